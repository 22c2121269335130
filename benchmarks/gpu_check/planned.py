"""Workloads that are planned on fake GPUs and then run on the device, and the plan of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpu_check.setting import in_new_process
from rl_megatron.config.loading.load import load_config
from rl_megatron.plan.ledger import Ledger
from rl_megatron.plan.phases import PhaseName, PhaseUse
from rl_megatron.plan.run import run_phases
from rl_megatron.plan.workload import Workload

COMMON = (
    "algorithm=grpo", "data.task.name=arithmetic", "loss.reference_policy_kl_penalty=0.1", "precision=bf16",
    "model.backend=portable",
)  # fmt: skip


def workload_of(
    overrides: Sequence[str], *, vocab_size: int, tokens: int, sequences: int, reference: bool = False
) -> Workload:
    """Return a step of GRPO on one GPU.

    Args:
        overrides: The configuration.
        vocab_size: The tokens of the vocabulary.
        tokens: The tokens of a sequence; an eighth of them is the prompt.
        sequences: The sequences of the step.
        reference: Whether there is a reference policy.
    """
    length = f"model.max_sequence_length={tokens}"
    stage = load_config([*COMMON, f"++model.vocab_size={vocab_size}", length, *overrides]).first
    algorithm = replace(stage.algorithm, prompts_per_step=sequences // 2, samples_per_prompt=2)
    train = replace(stage.train, global_batch_size=sequences)
    stage = replace(stage, algorithm=algorithm, train=train)
    return Workload(
        stage, 1, vocab_size, tokens // 8, tokens - tokens // 8, uses_reference=reference, recomputes_logprobs=True
    )


def plan_of(workload: Workload, phases: Sequence[PhaseName]) -> dict[PhaseName, PhaseUse]:
    """Return what `rl-megatron plan` counts for the phases of a workload, in a process of its own without a GPU."""
    return in_new_process(_plan, workload, tuple(phases), sees_gpus=False)


def _plan(workload: Workload, phases: tuple[PhaseName, ...]) -> dict[PhaseName, PhaseUse]:
    return {each.name: each.use() for each in run_phases(workload, 0, Ledger(), phases)}

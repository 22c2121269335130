"""Small workloads to plan, and functions that tests run in a fresh process."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.config.loading.load import load_config
from rl_megatron.plan.ledger import Ledger
from rl_megatron.plan.measured import Measured
from rl_megatron.plan.phases import PhaseName
from rl_megatron.plan.run import run_phases
from rl_megatron.plan.workload import Workload

SMALL = (
    "algorithm=grpo", "data.task.name=arithmetic", "model=nano", "model.num_layers=4", "+model.vocab_size=1024",
    "precision=bf16", "train.batching=padded", "train.micro_batch_size=2", "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=4", "train.global_batch_size=16", "loss.reference_policy_kl_penalty=0.1",
)  # fmt: skip
EXPERTS = (
    "model.num_experts=8", "model.experts_per_token=2", "model.expert_ffn_hidden_size=64",
)  # fmt: skip


def workload(world_size: int, *overrides: str, prompt_tokens: int = 32, response_tokens: int = 32) -> Workload:
    stage = load_config([*SMALL, *overrides]).first
    return Workload(
        stage, world_size, 1024, prompt_tokens, response_tokens, uses_reference=True, recomputes_logprobs=True
    )


def measured(
    world_size: int, rank: int, overrides: Sequence[str], phases: Sequence[PhaseName] | None = None
) -> dict[PhaseName, Measured]:
    """Run in a fresh process: the phases of `rank` by name."""
    return {each.name: each for each in run_phases(workload(world_size, *overrides), rank, Ledger(), phases)}

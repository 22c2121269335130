"""The estimate of a step, from closed forms of what its phases use."""

from __future__ import annotations

import pytest

from rl_megatron.config.loading.load import load_config
from rl_megatron.config.plan import PlanConfig
from rl_megatron.plan.closed_use import estimate_use
from rl_megatron.plan.command import build_workload
from rl_megatron.plan.devices import Cluster
from rl_megatron.plan.estimate import StepEstimate, estimate_step
from rl_megatron.plan.settings import Settings

GRPO = (
    "algorithm=grpo", "model=llama3_1_8b", "model.vocab_size=128256", "data.task.name=arithmetic", "precision=bf16",
    "algorithm.prompts_per_step=64", "algorithm.samples_per_prompt=16", "train.micro_batch_tokens=8192",
    "algorithm.recompute_logprobs=always",
)  # fmt: skip


def estimated(*overrides: str) -> StepEstimate:
    cluster = Cluster.from_config(PlanConfig(), "h200", nodes=1, gpus_per_node=8)
    settings = Settings.from_workload(build_workload(load_config([*GRPO, *overrides]).first, 8, PlanConfig()))
    uses = [estimate_use(settings, stage) for stage in range(settings.shape.parallel.pipeline)]
    return estimate_step(uses, settings, cluster)


def test_logprobs_of_all_updates_pass_the_pipeline_without_a_pause():
    """Training waits once for each optimizer step, and logprobs only once."""
    found = estimated("parallel.pipeline=4", "train.global_batch_size=128")  # 8 optimizer steps
    waiting = {}
    for name in ("train", "logprobs"):
        seconds = found.phases[name]
        waiting[name] = seconds.waiting / (max(seconds.compute + seconds.memory, seconds.launch))
    assert waiting["train"] == pytest.approx(3 / 64, rel=0.1)
    assert waiting["logprobs"] == pytest.approx(3 / 512, rel=0.1)


def test_the_amounts_of_a_phase_are_those_of_the_stage_whose_time_is_given():
    found = estimated("parallel.pipeline=2", "parallel.last_stage_layers=6")
    seconds, use = found.phases["train"], found.uses["train"]
    assert seconds.memory == pytest.approx(use.memory_bytes / (0.8 * 4800e9))


def test_utilisation_does_not_depend_on_operations_that_nobody_needs():
    """The same work in the same time is the same utilisation, whatever is computed besides."""
    fused, whole = estimated("train.fused_head=true"), estimated("train.fused_head=false")
    needed = {each.mfu * each.phases["train"].total for each in (fused, whole)}
    assert max(needed) == pytest.approx(min(needed))

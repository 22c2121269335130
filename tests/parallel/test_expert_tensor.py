"""Expert tensor parallelism: experts that are split over other ranks than attention give the results of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_megatron.batching.config import Batching
from rl_megatron.certify.measurement import Measurement, compare, run_workload
from rl_megatron.certify.single_process import run_in_one_process
from rl_megatron.certify.workload import Objective, Workload, build_small_batching
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.losses import NLLLoss
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from tests.parallel.layouts import EXPERTS, build_policy
from tests.parallel.test_layouts import random_batch

OBJECTIVES = {"clipped_pg": Objective("clipped_pg", {"reference_policy_kl_penalty": 0.05}), "dpo": Objective("dpo")}
LORA = LoraConfig(r=3, lora_alpha=5.0, init_lora_weights=False)
SHARED = {"shared_expert_ffn_hidden_size": 24, "shared_expert_gate": True}
MODELS = {
    "mixtral": replace(EXPERTS, init_std=0.15, qk_norm=False, qkv_bias=False),
    "qwen3_moe": replace(EXPERTS, init_std=0.15, qkv_bias=False, normalize_expert_weights=False),
    "shared expert": replace(EXPERTS, init_std=0.15, **SHARED),
}
TENSOR = {"tensor": 2, "sequence": True}
# The name of a layout -> its ranks, its degrees, the form of its batches, and whether the optimizer's state is split.
LAYOUTS = {
    "tensor 2, expert 2": (2, TENSOR | {"expert": 2}, "packed", True),
    "expert_tensor 2": (2, {"expert_tensor": 2}, "packed", True),
    "tensor 2, expert_tensor 2": (2, TENSOR | {"expert_tensor": 2}, "dynamic", False),
    "tensor 2, expert 2, expert_tensor 2": (4, TENSOR | {"expert": 2, "expert_tensor": 2}, "packed", True),
    "tensor 2, expert_tensor 4": (4, TENSOR | {"expert_tensor": 4}, "padded", True),
    "pipeline 2, context 2, expert_tensor 2": (
        4, {"pipeline": 2, "virtual_pipeline": 2, "context": 2, "expert_tensor": 2}, "packed", True,
    ),
}  # fmt: skip


def workload_of(model: ModelConfig, lora: LoraConfig | None, distributed: bool) -> Workload:
    optimizer = replace(Workload.optimizer, distributed=distributed, overlap=distributed)
    return Workload(model, OBJECTIVES, optimizer=optimizer, peft=lora)


def measured(parallel: dict, batching: str, workload: Workload) -> dict[str, Measurement]:
    degrees = ParallelConfig(**parallel)
    where = topology.build(degrees, start_device("cpu"), workload.seed)
    batchings: dict[str, Batching] = {
        name: build_small_batching(batching, 2, objective.group_size, degrees) for name, objective in OBJECTIVES.items()
    }
    return run_workload(workload, where, batchings)


def assert_like_one_process(ranks, model: ModelConfig, layout: str, lora: LoraConfig | None) -> None:
    world_size, parallel, batching, distributed = LAYOUTS[layout]
    wanted = ranks.reference(run_in_one_process, Workload(model, OBJECTIVES, peft=lora))
    found = ranks.run(world_size, measured, parallel, batching, workload_of(model, lora, distributed))[0]
    for name in wanted:
        assert [name for name in found[name].gradients if ".experts." in name]
        assert not [difference for difference in compare(found[name], wanted[name]) if not difference.holds]


# Experts and their adapters over fewer ranks than attention, over more, and with all degrees.
OF_ADAPTERS = ("expert_tensor 2", "tensor 2, expert 2", "tensor 2, expert 2, expert_tensor 2")
# mixtral has every layout. qwen3_moe, whose probabilities are not normalised, has those that also divide the experts.
PAIRS = [
    pytest.param(model, layout, marks=() if model == "mixtral" or "expert 2" in layout else pytest.mark.nightly)
    for model in ("mixtral", "qwen3_moe")
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_logprobs_and_gradients_are_those_of_one_process(ranks, model, layout):
    """So are the weights after a step and the metrics, the norm of the gradient among them."""
    assert_like_one_process(ranks, MODELS[model], layout, None)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_and_a_shared_expert_change_nothing(ranks, recompute):
    model = replace(MODELS["shared expert"], recompute=recompute)
    assert_like_one_process(ranks, model, "tensor 2, expert 2, expert_tensor 2", None)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=() if layout in OF_ADAPTERS else pytest.mark.nightly) for layout in LAYOUTS],
)
def test_adapters_of_experts_have_the_gradients_of_one_process(ranks, layout):
    assert_like_one_process(ranks, MODELS["qwen3_moe"], layout, LORA)


def dropout_in_experts() -> str:
    with pytest.raises(ConfigError) as error:
        build_policy({"expert_tensor": 2}, EXPERTS, peft=replace(LORA, lora_dropout=0.5))
    build_policy({"expert_tensor": 2}, EXPERTS, peft=replace(LORA, lora_dropout=0.5, target_modules=("o_proj",)))
    return str(error.value)


def test_dropout_in_adapters_of_split_experts_is_refused(ranks):
    for message in ranks.run(2, dropout_in_experts):
        assert "peft.lora_dropout=0.5 is not supported for adapters of experts with parallel.expert_tensor=2" in message
        assert "set peft.lora_dropout=0, or leave the experts out with peft.exclude_modules" in message


def norm_of_a_step(parallel: dict) -> float:
    policy = build_policy(parallel, MODELS["qwen3_moe"], peft=LORA)
    return policy.train(random_batch(8, 16, 0), NLLLoss(), gbs=8)["grad_norm"]


@pytest.mark.parametrize("parallel", [TENSOR | {"expert": 2}, {"expert_tensor": 2}], ids=str)
def test_the_norm_counts_adapters_that_are_whole_on_several_ranks_once(ranks, parallel):
    assert ranks.run(2, norm_of_a_step, parallel)[0] == pytest.approx(ranks.run(1, norm_of_a_step, {})[0], rel=1e-5)

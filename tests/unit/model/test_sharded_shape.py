"""The closed forms of parameters, gradients and optimizer state equal to the byte what a `MegatronPolicy` allocates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_megatron.checkpoint.optimizer_state import list_parts
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.gradient_buffers import GradientBuffer
from rl_megatron.model.lora.originals import find_whole_parameters
from rl_megatron.model.sharded_shape import Head, Parameter, ShardedShape
from rl_megatron.plan.closed_forms import TrainingBytes, mean_training_bytes, training_bytes
from tests.parallel.layouts import MODEL, build_policy

VOCAB_SIZE = 50

TIED = replace(MODEL, qk_norm=False, qkv_bias=False)
UNTIED = replace(MODEL, tie_embeddings=False)
GEMMA = replace(
    MODEL, num_layers=6, sandwich_norms=True, zero_centered_norm=True, qkv_bias=False, sliding_window=8,
    global_attention_every=3, head_dim=10, activation="gelu_tanh",
)  # fmt: skip
EXPERTS = replace(MODEL, num_experts=4, expert_ffn_hidden_size=24, tie_embeddings=False, qkv_bias=False)
SHARED = replace(EXPERTS, shared_expert_ffn_hidden_size=40, shared_expert_gate=True, first_dense_layers=1)
GLM = replace(
    EXPERTS, qkv_bias=True, partial_rotary_factor=0.5, shared_expert_ffn_hidden_size=24, first_dense_layers=1,
    router_score="sigmoid", router_bias=True,
)  # fmt: skip
SINKS = replace(
    EXPERTS, qkv_bias=True, qk_norm=False, linear_bias=True, attention_sinks=True, activation="swiglu_oai",
    sliding_window=8, global_attention_every=2,
)  # fmt: skip
LATENT = ModelConfig(
    num_layers=4, hidden_size=36, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=4, kv_lora_rank=11,
    q_lora_rank=13, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14, num_experts=4, expert_ffn_hidden_size=20,
    shared_expert_ffn_hidden_size=20, first_dense_layers=1, router_score="sigmoid", router_bias=True,
    tie_embeddings=False, max_sequence_length=64,
)  # fmt: skip
LATENT_QUERIES = replace(LATENT, q_lora_rank=None, num_experts=None, first_dense_layers=0, router_bias=False,
                         router_score="softmax", shared_expert_ffn_hidden_size=None, tie_embeddings=True)  # fmt: skip
DELTA = replace(
    MODEL, num_layers=4, full_attention_every=2, linear_num_key_heads=4, linear_num_value_heads=8,
    linear_key_head_dim=6, linear_value_head_dim=10, linear_conv_kernel_dim=3, attention_output_gate=True,
    qk_norm=True, qkv_bias=False, zero_centered_norm=True, tie_embeddings=False, max_sequence_length=256,
)  # fmt: skip


# (ranks, model, degrees, head)
CASES: dict[str, tuple[int, ModelConfig, dict[str, Any], Head]] = {
    "tied": (1, TIED, {}, "lm"),
    "untied, data 3": (3, UNTIED, {}, "lm"),
    "tied, tensor 2": (2, TIED, {"tensor": 2, "sequence": True}, "lm"),
    "qk_norm and biases, tensor 2 without sequence": (4, MODEL, {"tensor": 2}, "lm"),
    "tied over a pipeline": (2, MODEL, {"pipeline": 2}, "lm"),
    "tied over a pipeline, data 2": (4, TIED, {"pipeline": 2}, "lm"),
    "untied, uneven pipeline": (2, UNTIED, {"pipeline": 2, "last_stage_layers": 1}, "lm"),
    "interleaved, tied": (4, MODEL, {"pipeline": 2, "virtual_pipeline": 2}, "lm"),
    "context 2, data 2": (4, UNTIED, {"context": 2}, "lm"),
    "gemma-like, pipeline 2, tensor 2": (4, GEMMA, {"pipeline": 2, "tensor": 2, "sequence": True}, "lm"),
    "experts whole": (2, EXPERTS, {}, "lm"),
    "experts split": (4, EXPERTS, {"expert": 2}, "lm"),
    "experts and their matrices split": (
        4, SHARED, {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 2}, "lm",
    ),
    "matrices of experts split": (4, EXPERTS, {"expert_tensor": 2}, "lm"),
    "experts over tensor": (4, EXPERTS, {"tensor": 2, "sequence": True, "expert": 4}, "lm"),
    "shared and dense layers, interleaved": (
        4, SHARED, {"pipeline": 2, "virtual_pipeline": 2, "expert": 2}, "lm",
    ),
    "biased experts, partial rotation": (2, GLM, {"tensor": 2, "sequence": True, "expert": 2}, "lm"),
    "sinks and biases": (2, SINKS, {"tensor": 2, "sequence": True, "expert": 2}, "lm"),
    "latent attention, experts split": (4, LATENT, {"tensor": 2, "sequence": True, "expert": 2}, "lm"),
    "latent attention, whole queries": (2, LATENT_QUERIES, {"tensor": 2}, "lm"),
    "delta rule, tensor 2": (2, DELTA, {"tensor": 2, "sequence": True}, "lm"),
    "delta rule, uneven pipeline": (2, DELTA, {"pipeline": 2, "last_stage_layers": 1}, "lm"),
    "score head, pipeline 2": (2, MODEL, {"pipeline": 2}, "score"),
}  # fmt: skip
OPTIMIZERS = {
    "bf16": ("bf16", OptimizerConfig(distributed=True)),
    "bf16, overlap": ("bf16", OptimizerConfig(distributed=True, overlap=True)),
    "bf16, whole": ("bf16", OptimizerConfig(distributed=False)),
    "fp32": ("fp32", OptimizerConfig(distributed=True)),
    "fp32, whole": ("fp32", OptimizerConfig(distributed=False)),
}


def allocated(
    model: ModelConfig,
    degrees: dict[str, Any],
    head: Head,
    optimizer: OptimizerConfig,
    precision: str,
    peft: LoraConfig | None = None,
) -> TrainingBytes:
    """Return the bytes of the storages that a policy holds on this rank."""
    policy = build_policy(degrees, model, optimizer, precision, vocab_size=VOCAB_SIZE, head=head, peft=peft)
    weights, gradients, state = {}, {}, {}

    def add(storages: dict[int, int], tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()

    for model_chunk in policy.model.model_chunks:
        for parameter in model_chunk.parameters():
            add(weights, parameter)
            if parameter.requires_grad:
                add(gradients, parameter.main_grad)
    for _, original in find_whole_parameters(policy.model.model_chunks):
        add(weights, original)
    for part in list_parts(policy.optimizer):
        for tensor in (p for group in part.optimizer.param_groups for p in group["params"]):
            add(state, tensor)
        for entry in part.optimizer.state.values():
            for tensor in entry.values():
                if torch.is_tensor(tensor) and tensor.dim():
                    add(state, tensor)
    state = {pointer: size for pointer, size in state.items() if pointer not in weights}
    return TrainingBytes(sum(weights.values()), sum(gradients.values()), sum(state.values()))


@pytest.mark.change
@pytest.mark.parametrize("settings", OPTIMIZERS)
@pytest.mark.parametrize("case", CASES)
def test_the_closed_forms_equal_what_a_policy_allocates_on_every_rank(ranks, case, settings):
    world_size, model, degrees, head = CASES[case]
    precision, optimizer = OPTIMIZERS[settings]
    held = ranks.run(world_size, allocated, model, degrees, head, optimizer, precision)
    assert held == closed(case, settings)


@pytest.mark.parametrize("case", ["interleaved, tied", "experts over tensor"])
def test_the_closed_forms_equal_two_layouts_of_every_push(ranks, case):
    test_the_closed_forms_equal_what_a_policy_allocates_on_every_rank(ranks, case, "bf16")


def closed(case: str, settings: str) -> list[TrainingBytes]:
    """Return the closed forms of all ranks."""
    world_size, model, degrees, head = CASES[case]
    precision, optimizer = OPTIMIZERS[settings]
    shape = ShardedShape(model, ParallelConfig(**degrees), world_size, VOCAB_SIZE, head)
    options = {"precision": precision, "distributed": optimizer.distributed, "overlap": optimizer.overlap}
    return [training_bytes(shape, rank, **options) for rank in range(world_size)]


@pytest.mark.parametrize("case", CASES)
def test_the_mean_over_ranks_is_the_sum_of_all_parameters(case):
    world_size, model, degrees, head = CASES[case]
    shape = ShardedShape(model, ParallelConfig(**degrees), world_size, VOCAB_SIZE, head)
    of_stage = world_size // shape.parallel.pipeline
    for stage in range(shape.parallel.pipeline):
        mean = mean_training_bytes(shape, stage, precision="bf16", distributed=True)
        every = [
            training_bytes(shape, stage * of_stage + rank, precision="bf16", distributed=True).optimizer
            for rank in range(of_stage)
        ]
        assert mean.optimizer == pytest.approx(sum(every) / of_stage, abs=1)
        assert mean.parameters == 2 * sum(p.elements for part in shape.parameters(stage) for p in part)


def test_a_bucket_ends_after_its_number_of_elements_and_around_a_shared_embedding():
    parameters = [Parameter(100, is_shared=True), *[Parameter(64)] * 5]
    buffer = GradientBuffer.from_parameters(parameters, 4, distributed=True, bucket_elements=128)
    assert buffer.buckets == ((0, 128), (128, 256), (256, 384), (384, 512))
    assert buffer.parameters[-1] == (384, 484)
    assert [buffer.shard_elements(rank) for rank in range(4)] == [128, 128, 96, 68]

"""The same small policy in any layout, built on the ranks of the worker pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from rl_megatron.batching.config import Batching
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.model.shards import gather_full
from rl_megatron.topology import topology
from rl_megatron.topology.device import start_device
from rl_megatron.training.megatron_policy import MegatronPolicy

VOCAB_SIZE = 50  # the model pads it to 64; the padding must not change any result

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    max_sequence_length=64,
    qk_norm=True,
    qkv_bias=True,
    init_std=0.1,  # makes logits far from uniform, so that errors show
)
EXPERTS = replace(MODEL, num_experts=4, expert_ffn_hidden_size=32)


# If ε is small, Adam's first step is the sign of the gradient. The rounding error of a gradient near zero would then
# become a whole step, and the next step would compare different models. A large ε keeps the steps of small gradients
# small.
OPTIMIZER = OptimizerConfig(lr=1e-2, epsilon=1e-3, distributed=False)
DISTRIBUTED_OPTIMIZER = OptimizerConfig(lr=1e-2, epsilon=1e-3, distributed=True)


def build_policy(
    parallel: dict,
    model: ModelConfig = MODEL,
    optimizer: OptimizerConfig | None = None,
    precision: str = "fp32",
    seed: int = 1,
    vocab_size: int = VOCAB_SIZE,
    micro_batch_size: int = 8,
    **kwargs: Any,
) -> MegatronPolicy:
    device = start_device("cpu")
    layout = topology.build(ParallelConfig(**parallel), device, seed)
    return MegatronPolicy(
        model,
        layout,
        vocab_size=vocab_size,
        precision=precision,
        seed=seed,
        optimizer=optimizer or OPTIMIZER,
        **{"batching": Batching(sequences=micro_batch_size), "total_steps": 10, **kwargs},
    )


def gradients(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """Return the whole gradient of every parameter on rank 0."""
    return gather_full(policy.model.model_chunks, value=lambda parameter: parameter.main_grad)


def weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    policy.finish_training()
    return gather_full(policy.model.model_chunks)


def worst_relative_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest max|found − wanted| / max|wanted| of all parameters, and the name of that parameter."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    errors = {}
    for name, reference in wanted.items():
        scale = reference.abs().max().clamp(min=1e-12)
        errors[name] = ((found[name] - reference).abs().max() / scale).item()
    worst = max(errors, key=errors.get)
    return errors[worst], worst

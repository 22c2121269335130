"""Gradients that linears add to the gradient buffer themselves equal those that autograd and DDP add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.tensor_parallel import layers

from rl_megatron.config.model import ModelConfig
from rl_megatron.losses import NLLLoss
from rl_megatron.model import build
from rl_megatron.model.layers import weight_gradient
from tests.parallel.layouts import DISTRIBUTED_OPTIMIZER, EXPERTS, MODEL, build_policy, gradients, worst_relative_error
from tests.parallel.test_layouts import random_batch

OVERLAPPED = replace(DISTRIBUTED_OPTIMIZER, overlap=True)
CASES = {
    "one rank": (1, {}, MODEL),
    "untied": (1, {}, replace(MODEL, tie_embeddings=False)),
    "recomputed": (1, {}, replace(MODEL, recompute="full")),
    "tensor": (2, {"tensor": 2}, MODEL),
    "sequence": (2, {"tensor": 2, "sequence": True}, MODEL),
    "interleaved pipeline": (2, {"pipeline": 2, "virtual_pipeline": 2}, MODEL),
    "experts": (2, {"tensor": 2, "sequence": True, "expert": 2}, EXPERTS),
    "data": (2, {}, EXPERTS),
}


def gradients_of(
    parallel: dict, model: ModelConfig, precision: str, is_fused: bool
) -> tuple[int, dict[str, torch.Tensor]]:
    """Return how many products were added to the buffer, and the gradients of two global batches in microbatches."""
    products = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(layers, "_grad_accum_fusion_available", layers._grad_accum_fusion_available)
        monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", None, raising=False)
        added = weight_gradient.add_weight_gradient
        monkeypatch.setattr(
            weight_gradient, "add_weight_gradient", lambda *tensors: products.append(1) or added(*tensors)
        )
        if is_fused:  # as on a GPU
            fuse = weight_gradient.fuse_weight_gradients
            monkeypatch.setattr(build, "fuse_weight_gradients", lambda topology: fuse(replace(topology, device=CUDA)))
        policy = build_policy(parallel, model=model, precision=precision, optimizer=OVERLAPPED)
        for seed in range(2):  # the buffer is empty again for the second
            policy.accumulate_gradients(random_batch(8, 16, seed), NLLLoss(), mbs=2)
        return len(products), gradients(policy)


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_same_in_the_buffer(ranks, case, precision):
    world_size, parallel, model = CASES[case]
    count, expected = ranks.run(world_size, gradients_of, parallel, model, precision, False)[0]
    fused_count, found = ranks.run(world_size, gradients_of, parallel, model, precision, True)[0]
    assert count == 0 and fused_count > 20
    assert found.keys() == expected.keys()
    error, name = worst_relative_error(found, expected)
    assert error <= (1e-5 if precision == "fp32" else 2e-2), (name, error)

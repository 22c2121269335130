"""Attention of the last queries on a GPU equals its formula, and layers without a window keep no mask."""

import itertools

import pytest
import torch

from rl_megatron.model.layers.attention import attend
from rl_megatron.model.layers.attention_kernels import (
    attend_by_cudnn,
    attend_last,
    attend_within_pack,
    flash_attends_last,
)
from rl_megatron.model.layers.packed import build_causal_bias

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def case(num_queries: int, num_keys: int, heads: int, groups: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = ((num_queries, 2, heads, dim), (num_keys, 2, groups, dim), (num_keys, 2, groups, dim))
    return [torch.randn(s, generator=generator, device="cuda").to(dtype).requires_grad_() for s in shapes]


def formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    heads, (num_queries, num_keys) = query.size(2), (len(query), len(key))
    query, key, value = (x.double().repeat_interleave(heads // x.size(2), dim=2) for x in (query, key, value))
    scores = torch.einsum("qbnd,kbnd->bnqk", query, key) / query.size(-1) ** 0.5
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device="cuda").tril(num_keys - num_queries)
    return torch.einsum("bnqk,kbnd->qbnd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value).flatten(2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(8, 8, 64), (8, 2, 128), (4, 1, 80)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(64, 128), (64, 64), (96, 250)])
def test_the_last_queries_attend_to_all_keys_before_them(num_queries, num_keys, heads, groups, dim, biased):
    inputs = case(num_queries, num_keys, heads, groups, dim, torch.bfloat16)
    if biased:
        positions = torch.arange(num_keys - num_queries, num_keys, device="cuda")
        found = attend(*inputs, build_causal_bias(positions, num_keys, None, torch.bfloat16), None)
    else:
        assert flash_attends_last(inputs[0], inputs[2])
        found = attend_last(*inputs, None)
    wanted = formula(*inputs)
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
    upstream = torch.randn(wanted.shape, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda")
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream.to(found.dtype)),
        torch.autograd.grad(wanted, inputs, upstream.double()),
        strict=True,
    ):
        torch.testing.assert_close(one.float(), other.float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("length", [2048, 2040])  # torch copies a bias unless its rows begin at multiples of 16 numbers
def test_layers_share_the_memory_of_a_bias(length):
    query, key, value = case(length, length, 8, 8, 64, torch.bfloat16)
    bias = build_causal_bias(torch.arange(length, device="cuda"), length, 100, torch.bfloat16)
    kept = attend(query, key, value, bias, None)
    before = torch.cuda.memory_allocated()
    outputs = [attend(query, key, value, bias, None) for _ in range(4)]
    grown = (torch.cuda.memory_allocated() - before) / len(outputs)
    assert grown < kept.nbytes * 2 + bias.nbytes / 4


def assert_close_with_gradients(found, wanted, inputs):
    weights = torch.randn(found.shape, generator=torch.Generator(device="cuda").manual_seed(1), device="cuda")
    of_found = torch.autograd.grad(found, inputs, weights.to(found.dtype))
    of_wanted = torch.autograd.grad(wanted, inputs, weights.double())
    for one, other in zip((found, *of_found), (wanted, *of_wanted), strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 1e-2, error


@pytest.mark.parametrize(("heads", "groups", "dim"), [(14, 2, 64), (8, 8, 128), (4, 1, 80)])
def test_each_sequence_of_a_pack_attends_to_itself(heads, groups, dim):
    lengths = [1, 70, 128, 3, 250]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    parts = [
        torch.randn(sum(lengths), n, dim, generator=generator, device="cuda").bfloat16().requires_grad_()
        for n in (heads, groups, groups)
    ]
    found = attend_within_pack(*parts, starts, max(lengths), None)
    sequences = zip(*(x.split(lengths) for x in parts), strict=True)
    wanted = torch.cat([formula(*(x[:, None] for x in sequence))[:, 0] for sequence in sequences])
    assert_close_with_gradients(found, wanted, parts)


@pytest.mark.parametrize(("heads", "groups", "dim"), [(14, 2, 64), (8, 8, 128)])
def test_cudnn_attends_as_flash_does(heads, groups, dim):
    inputs = case(96, 96, heads, groups, dim, torch.bfloat16)
    assert_close_with_gradients(attend_by_cudnn(*inputs, None), formula(*inputs), inputs)

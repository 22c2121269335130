"""Rotation by RoPE and the gated activation have the bits of their formulas, and their gradients those of autograd."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from torch.nn.functional import gelu, silu

from rl_megatron.model.layers import gated_activation, rope, triton_layers
from rl_megatron.model.layers.gated_activation import GatedActivation
from rl_megatron.model.layers.rope import compute_turns, rotate, split_and_rotate

S, B, G, PER_GROUP, D = 7, 3, 2, 2, 8


@pytest.fixture(autouse=True, params=["torch", "triton"])
def kernels(request, monkeypatch):
    """Compute with torch's operators or, in Triton's interpreter, with the kernels for a GPU."""
    if request.param == "triton":
        for module in (rope, gated_activation):
            monkeypatch.setattr(module, "find_layer_kernels", lambda device: triton_layers)
    return request.param


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request):
    torch.manual_seed(0)
    return request.param


def rotated(x, angles):
    return _apply_rotary_pos_emb_bshd(x, torch.cat([angles, angles], dim=-1))


@pytest.fixture
def assert_same(kernels, dtype):
    """Return the comparison of bits. Triton's interpreter, unlike a GPU, rounds bf16 towards 0 (see tests/gpu)."""
    loose = kernels == "triton" and dtype is torch.bfloat16
    return partial(compare, rtol=2**-6, atol=2**-6) if loose else compare


def compare(function, formula, *inputs, rtol=0, atol=0):
    """Compare the results of two functions and the gradients of their inputs."""
    found, wanted = ([*run] if isinstance(run := f(*inputs), tuple) else [run] for f in (function, formula))
    weights = [torch.randn_like(x) for x in wanted]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
    gradients = (torch.autograd.grad(results, inputs, weights) for results in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def test_rotation_has_the_bits_of_megatron_cores(dtype, assert_same):
    angles = 3 * torch.randn(S, 1, 1, D // 2)
    x = torch.randn(S, B, G, D, dtype=dtype, requires_grad=True)
    assert_same(lambda x: rotate(x, compute_turns(angles)), lambda x: rotated(x, angles), x)
    assert_same(lambda x: rotate(x, compute_turns(angles), 1.5), lambda x: _scaled(x, angles, 1.5), x)


def _scaled(x, angles, scale):
    return _apply_rotary_pos_emb_bshd(x, torch.cat([angles, angles], dim=-1), mscale=scale)


@pytest.mark.change
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_a_part_of_each_head_is_rotated_as_megatron_core_does(dtype, assert_same, interleaved):
    angles = 3 * torch.randn(S, 1, 1, D // 4)
    pairs = torch.stack([angles, angles], dim=-1) if interleaved else torch.stack([angles, angles], dim=-2)

    def formula(x):
        return _apply_rotary_pos_emb_bshd(x, pairs.flatten(-2), rotary_interleaved=interleaved)

    def of_mixed(mixed):
        query, key, value = mixed.split([PER_GROUP * D, D, D], dim=-1)
        return formula(query.reshape(S, B, G * PER_GROUP, D)), formula(key), value

    x = torch.randn(S, B, G, D, dtype=dtype, requires_grad=True)
    assert_same(lambda x: rotate(x, compute_turns(angles), interleaved=interleaved), formula, x)
    mixed = torch.randn(S, B, G, (PER_GROUP + 2) * D, dtype=dtype, requires_grad=True)
    assert_same(lambda x: split_and_rotate(x, compute_turns(angles), D, interleaved=interleaved), of_mixed, mixed)


def test_query_key_and_value_are_split_as_megatron_core_splits_them(dtype, assert_same):
    angles = 3 * torch.randn(S, 1, 1, D // 2)
    mixed = torch.randn(S, B, G, (PER_GROUP + 2) * D, dtype=dtype, requires_grad=True)

    def formula(mixed):
        query, key, value = mixed.split([PER_GROUP * D, D, D], dim=-1)
        return rotated(query.reshape(S, B, G * PER_GROUP, D), angles), rotated(key, angles), value

    assert_same(lambda mixed: split_and_rotate(mixed, compute_turns(angles), D), formula, mixed)


def test_the_clamped_swiglu_has_the_bits_of_its_formula_and_its_gradient(dtype):
    """Some numbers are beyond the limit, at it, and at its negative."""

    def formula(both):
        # Versions of torch disagree on the gradient of `clamp` at its limits.
        gate, up = (torch.where(x > 7.0, 7.0, x) for x in both.chunk(2, dim=-1))
        up = torch.where(up < -7.0, -7.0, up)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    both = (6 * torch.randn(S, B, 10)).to(dtype)
    both[0, 0, :], both[0, 1, :] = 7.0, -7.0
    assert (both.abs() > 7).any()
    activation = GatedActivation(None, "swiglu_oai")
    torch.testing.assert_close(activation(both), formula(both), rtol=0, atol=0)
    exact = both.double().requires_grad_()
    weights = torch.randn(S, B, 5, dtype=exact.dtype)
    gradients = [torch.autograd.grad(function(exact), exact, weights)[0] for function in (activation, formula)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_a_gated_activation_has_the_bits_of_its_formula(dtype, name, kernels, assert_same):
    activation = {"silu": silu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}[name]
    both = torch.randn(S, B, 10, dtype=dtype, requires_grad=True)
    if kernels == "triton" and dtype is torch.float32:
        assert_same = partial(compare, rtol=1e-6, atol=1e-6)  # exp of another library
    assert_same(GatedActivation(None, name), lambda x: activation(x[..., :5]) * x[..., 5:], both)

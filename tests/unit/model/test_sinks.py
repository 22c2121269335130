"""Attention with sinks equals its formula, in values and in every gradient."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.model.layers.attention import attend
from rl_megatron.model.layers.packed import build_causal_bias
from rl_megatron.model.layers.sinks import attend_once_with_sinks

B, N, G, D, SCALE = 2, 4, 2, 6, 0.3


def formula(query, key, value, bias, sinks):
    """Return attention [S_q, B, N·D] by a softmax with one more column."""
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    key, value = (x.repeat_interleave(N // G, dim=1) for x in (key, value))
    scores = SCALE * query @ key.transpose(-1, -2) + bias
    column = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    shares = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return (shares @ value).permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize(
    ("queries", "keys", "window"), [(9, 9, None), (9, 9, 4), (4, 9, None)], ids=["causal", "window", "last queries"]
)
def test_attention_with_sinks_and_its_gradients_equal_the_formula(queries, keys, window):
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, B, N, D), (keys, B, G, D), (keys, B, G, D), (N,))
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    bias = build_causal_bias(torch.arange(keys - queries, keys), keys, window, torch.float32)
    *tensors, sinks = inputs
    given = None if window is None and queries == keys else bias
    found, wanted = attend(*tensors, given, SCALE, sinks), formula(*tensors, bias, sinks)
    without = attend(*tensors, given, SCALE)
    assert (found - without).abs().max() > 0.1, "sinks without effect would hide errors"
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    weights = torch.randn(found.shape, generator=generator)
    for one, other in zip(*(torch.autograd.grad(each, inputs, weights) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_one_token_per_sequence_attends_as_the_last_of_its_sequence():
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(5, B, heads, D, generator=generator) for heads in (N, G, G))
    sinks, bias = torch.randn(N, generator=generator), build_causal_bias(torch.arange(5), 5, None, torch.float32)
    wanted = formula(query, key, value, bias, sinks)[-1].view(B, N, D)
    grouped = query[-1].unflatten(1, (G, -1))
    found = attend_once_with_sinks(
        grouped, key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), sinks, torch.zeros(B, 1, 1, 5), SCALE
    )
    torch.testing.assert_close(found.flatten(1, 2), wanted, atol=1e-6, rtol=0)

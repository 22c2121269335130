"""Tokens are grouped by their experts as megatron-core groups them, to the bit, with the same gradients."""

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from torch._subclasses import FakeTensorMode

from rl_megatron.model.layers.expert_dispatch import permute

TOKENS, EXPERTS, CHOSEN = 37, 8, 3


def inputs():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(TOKENS, 5, generator=generator).requires_grad_()
    probs = torch.rand(TOKENS, EXPERTS, generator=generator).requires_grad_()
    routing = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    return tokens, routing.scatter(1, probs.topk(CHOSEN).indices, True), probs


@pytest.mark.parametrize("weighted", [True, False])
def test_tokens_weights_places_and_gradients_are_megatrons(weighted):
    tokens, routing, probs = inputs()
    found = permute(tokens, routing, probs if weighted else None, TOKENS * CHOSEN)
    expected = moe_utils.permute(tokens, routing, probs if weighted else None, TOKENS * CHOSEN)[:3]
    assert (found[1] is None) == (not weighted)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)
    of = [tokens, probs] if weighted else [tokens]
    gradients = [
        torch.autograd.grad(sum((each.sin() * 3).sum() for each in result[:2] if each is not None), of)
        for result in (found, expected)
    ]
    assert all(map(torch.equal, *gradients))


def test_shapes_are_known_without_values():
    tokens, routing, probs = inputs()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(each.detach()) for each in (tokens, routing, probs)]
        grouped, weights, places = permute(*fake, TOKENS * CHOSEN)
    assert [tuple(each.shape) for each in (grouped, weights, places)] == [(111, 5), (111,), (111,)]


def test_other_ways_are_megatrons():
    tokens, routing, _ = inputs()
    found, expected = (
        function(tokens, routing, None, TOKENS * CHOSEN, drop_and_pad=True) for function in (permute, moe_utils.permute)
    )
    assert torch.equal(found[0], expected[0])

"""The gated delta rule in blocks equals the rule token by token, and states carry a sequence on."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.model.layers.delta_rule import BLOCK, apply_delta_rule, convolve

GROUPS, VALUES, KEY, VALUE = 2, 3, 5, 4


def inputs(length: int) -> tuple[torch.Tensor, ...]:
    """Return query, key, value, log decay and strength of two sequences, all of which need gradients."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(GROUPS, KEY), (GROUPS, KEY), (GROUPS, VALUES, VALUE), (GROUPS, VALUES), (GROUPS, VALUES)]
    drawn = [torch.randn(2, length, *shape, generator=generator) for shape in shapes]
    drawn[3], drawn[4] = -drawn[3].exp() / 8, drawn[4].sigmoid()
    return tuple(x.requires_grad_() for x in drawn)


def token_by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    strength: torch.Tensor,
    memory: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the definition in fp64."""
    query, key, value, log_decay, strength, memory = (
        x.double() for x in (query, key, value, log_decay, strength, memory)
    )
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    outputs = []
    for t in range(query.size(1)):
        memory = memory * log_decay[:, t, ..., None, None].exp()
        known = torch.einsum("bgk,bgrkv->bgrv", key[:, t], memory)
        update = strength[:, t, ..., None] * (value[:, t] - known)
        memory = memory + torch.einsum("bgk,bgrv->bgrkv", key[:, t], update)
        outputs.append(torch.einsum("bgk,bgrkv->bgrv", query[:, t] / KEY**0.5, memory))
    return torch.stack(outputs, dim=1), memory


@pytest.mark.parametrize("length", [1, 7, BLOCK, 2 * BLOCK + 5])
def test_blocks_equal_the_rule_token_by_token_with_every_gradient(length):
    given, memory = inputs(length), torch.randn(2, GROUPS, VALUES, KEY, VALUE, requires_grad=True)
    of_blocks, of_tokens = apply_delta_rule(*given, memory), token_by_token(*given, memory)
    gradients = []
    for output, last in (of_blocks, of_tokens):
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        gradients.append(torch.autograd.grad((output * weights).sum() + last.square().sum(), [*given, memory]))
    for found, wanted in zip((*of_blocks, *gradients[0]), (*of_tokens, *gradients[1]), strict=True):
        torch.testing.assert_close(found.double(), wanted.double(), atol=2e-5, rtol=1e-5)


def test_a_sequence_goes_on_from_its_states():
    length, first = 90, 70
    given = [x.detach() for x in inputs(length)]
    whole, end = apply_delta_rule(*given)
    head, memory = apply_delta_rule(*(x[:, :first] for x in given))
    tail, after = apply_delta_rule(*(x[:, first:] for x in given), memory)
    torch.testing.assert_close(torch.cat([head, tail], dim=1), whole)
    torch.testing.assert_close(after, end)


def test_what_follows_a_sequences_end_is_not_in_its_memory():
    given, lengths = [x.detach() for x in inputs(80)], torch.tensor([66, 0])
    _, memory = apply_delta_rule(*given, lengths=lengths)
    torch.testing.assert_close(memory[:1], apply_delta_rule(*(x[:1, :66] for x in given))[1])
    assert not memory[1].any()


def test_strong_decay_is_finite():
    """A product of decays underflows, and the decay from a later token to an earlier one would overflow."""
    given = [x.detach() for x in inputs(BLOCK)]
    given[3].fill_(-80.0).requires_grad_()
    output, memory = apply_delta_rule(*given)
    (gradient,) = torch.autograd.grad(output.sum() + memory.sum(), given[3])
    assert output.isfinite().all() and memory.isfinite().all() and gradient.isfinite().all()


def test_the_convolution_reads_only_what_is_before_and_goes_on_from_its_last_inputs():
    x, weight = torch.randn(2, 9, 3), torch.randn(3, 4)
    found, last = convolve(x, weight)
    channels = torch.nn.functional.conv1d(x.mT, weight[:, None], padding=3, groups=3)[..., :9].mT
    torch.testing.assert_close(found, channels)
    assert torch.equal(last, x[:, -3:])
    head, before = convolve(x[:, :2], weight)
    tail, _ = convolve(x[:, 2:], weight, before)
    torch.testing.assert_close(torch.cat([head, tail], dim=1), found)
    _, at_ends = convolve(x, weight, lengths=torch.tensor([5, 1]))
    assert torch.equal(at_ends[0], x[0, 2:5])
    assert torch.equal(at_ends[1], torch.cat([torch.zeros(2, 3), x[1, :1]]))

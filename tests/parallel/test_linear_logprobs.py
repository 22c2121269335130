"""The fused head on tensor- and sequence-parallel ranks: its outputs and gradients equal those of one process."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_megatron.logprobs import linear_logprobs
from rl_megatron.topology.collectives import ALL_GATHER, REDUCE_SCATTER

SEQUENCE, BATCH, HIDDEN, VOCAB, VALID, IDS = 12, 2, 8, 48, 43, 3


def make_case(pattern):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    targets = torch.randint(VALID, (SEQUENCE, BATCH), generator=generator)
    if pattern == "some":  # many ignored tokens on one rank, few on another
        targets[:5] = -100
        targets[7, 1] = -100
        hidden[:5] = torch.nan
    elif pattern == "none":
        targets[:] = -100
    ids = torch.randint(VALID, (SEQUENCE, BATCH, IDS), generator=generator)
    temperature = 0.5 + torch.rand(SEQUENCE, BATCH, generator=generator)
    upstream = [torch.randn(shape, generator=generator) for shape in (*[(SEQUENCE, BATCH)] * 2, (SEQUENCE, BATCH, IDS))]
    return hidden, weight, targets, ids, temperature, upstream


def run(pattern, sequence_parallel, block_tokens):
    """Run the fused head on this rank's shards.

    Returns:
        The outputs, the gradients of the hidden states and of the weights, and how often each collective was called in
        the forward pass, and in both passes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden, weight, targets, ids, temperature, upstream = make_case(pattern)
    hidden = (hidden.chunk(size)[rank] if sequence_parallel else hidden).requires_grad_()
    weight = weight.chunk(size)[rank].clone().requires_grad_()
    calls = {}

    def counting(name, function):
        def counted(*args, **kwargs):
            calls[name] = calls.get(name, 0) + 1
            return function(*args, **kwargs)

        return counted

    names = (ALL_GATHER, REDUCE_SCATTER, "all_reduce")
    with mock.patch.multiple(dist, **{name: counting(name, getattr(dist, name)) for name in names}):
        stats = linear_logprobs(
            hidden, weight, targets, dist.group.WORLD, valid_vocab_size=VALID, temperature=temperature, entropy=True,
            gather_ids=ids, block_tokens=block_tokens, sequence_parallel=sequence_parallel,
        )  # fmt: skip
        forward = dict(calls)
        gradients = torch.autograd.grad(list(stats), (hidden, weight), upstream)
    return [x.detach() for x in stats], *gradients, forward, calls


@pytest.mark.parametrize("pattern", ["all", "some", "none"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_shards_equal_the_whole(ranks, size, sequence_parallel, pattern):
    ((outputs, hidden_grad, weight_grad, *_),) = ranks.run(1, run, pattern, False, None)
    found = ranks.run(size, run, pattern, sequence_parallel, 6)
    for others, *_ in found:
        for got, want in zip(others, outputs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    hidden_parts = [part for _, part, *_ in found]
    if not sequence_parallel:
        assert all(torch.equal(part, hidden_parts[0]) for part in hidden_parts)
    got = torch.cat(hidden_parts) if sequence_parallel else hidden_parts[0]
    torch.testing.assert_close(got, hidden_grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([part for _, _, part, *_ in found]), weight_grad, rtol=1e-5, atol=1e-6)


def test_the_collectives(ranks):
    """Statistics are gathered once, hidden states and their gradients once for each of 4 token blocks."""
    for *_, forward, both in ranks.run(2, run, "all", False, 6):
        assert forward == {ALL_GATHER: 1, "all_reduce": 1}  # the all-reduce is for the gathered ids
        assert both == {ALL_GATHER: 1, "all_reduce": 1 + 4}
    for *_, forward, both in ranks.run(2, run, "all", True, 6):
        assert forward == {ALL_GATHER: 1 + 4, "all_reduce": 1}
        assert both == {ALL_GATHER: 1 + 8, "all_reduce": 1, REDUCE_SCATTER: 4}

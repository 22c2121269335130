"""Top-k and top-p on vocabulary shards: thresholds and logprobs equal those of whole logits; number of collectives."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_megatron.logprobs import IGNORE_INDEX, SamplingFilter, vocab_parallel_logprobs
from rl_megatron.logprobs.sampling_filter import filter_thresholds
from rl_megatron.logprobs.vocab_parallel import VocabShard
from rl_megatron.topology.collectives import ALL_GATHER, REDUCE_SCATTER

ROWS = 23


def make_logits(vocab, dtype):
    logits = 3 * torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(0))
    logits[1], logits[2, 3:], logits[3] = -torch.inf, -torch.inf, 1.0
    return logits.to(dtype)


def sharded(vocab, dtype, valid, sampling_filter, **options):
    rank, size = dist.get_rank(), dist.get_world_size()
    logits = make_logits(vocab, dtype).chunk(size, dim=1)[rank]
    shard = VocabShard(rank * vocab // size, (rank + 1) * vocab // size, valid, dist.group.WORLD)
    temperature, active = torch.linspace(0.5, 2.0, ROWS), torch.arange(ROWS) != 5
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
        return filter_thresholds(logits, sampling_filter, shard, temperature, active, **options), reduce.call_count


@pytest.mark.parametrize(
    ("sampling_filter", "reductions"),
    [(SamplingFilter(top_k=9), 0), (SamplingFilter(top_p=0.8), 1), (SamplingFilter(top_k=9, top_p=0.8), 1)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_give_the_bits_of_the_whole(ranks, size, dtype, sampling_filter, reductions):
    for valid in (120, 85):  # with 85, the last of four ranks holds only padding
        want, none = ranks.reference(sharded, 120, dtype, valid, sampling_filter)
        assert none == 0 and torch.isfinite(want).sum() >= ROWS - 3  # except rows 1, 2 and 5
        for found, calls in ranks.run(size, sharded, 120, dtype, valid, sampling_filter):
            assert torch.equal(found, want) and calls == reductions


def searched(dtype, sampling_filter):
    """Return thresholds that are not among the candidates, because only two tokens of each rank are."""
    return sharded(120, dtype, 85, sampling_filter, num_candidates=2)[0]


@pytest.mark.parametrize(
    "sampling_filter", [SamplingFilter(top_k=9), SamplingFilter(top_p=0.8), SamplingFilter(top_k=9, top_p=0.8)], ids=str
)
def test_rows_without_enough_candidates_are_searched_to_the_same_bits(ranks, sampling_filter):
    for dtype in (torch.float32, torch.bfloat16):
        want, _ = ranks.reference(sharded, 120, dtype, 85, sampling_filter)
        for found in ranks.run(2, searched, dtype, sampling_filter):
            assert torch.equal(found, want)


COLLECTIVES = ("all_gather", "all_reduce", ALL_GATHER, REDUCE_SCATTER, "broadcast", "all_to_all")


def filtered(outside, with_ids, dtype):
    """Compute filtered logprobs on this rank's part of 120 columns; the parts have different widths.

    Returns:
        The streams, the gradient, and the numbers of collectives of the forward pass and of both passes.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    edges = {1: [0, 120], 2: [0, 50, 120], 4: [0, 50, 50, 90, 120]}[size]  # the second of four ranks has no column
    whole = make_logits(120, dtype)
    generator = torch.Generator().manual_seed(3)
    targets, *ids = torch.randint(0, 120, (3, ROWS), generator=generator)
    targets[::2], targets[5] = whole[::2].argmax(-1), IGNORE_INDEX
    ids = torch.stack([targets.clamp(min=0), *ids], dim=1)
    buffer = whole[:, edges[rank] : edges[rank + 1]].clone().requires_grad_() * 1
    with mock.patch.multiple(dist, **{name: mock.Mock(side_effect=getattr(dist, name)) for name in COLLECTIVES}):
        found = vocab_parallel_logprobs(
            buffer, targets, dist.group.WORLD, vocab_range=(edges[rank], edges[rank + 1]),
            temperature=torch.linspace(0.5, 2.0, ROWS), entropy=True, gather_ids=ids if with_ids else None,
            sampling_filter=SamplingFilter(top_k=20, top_p=0.9, outside=outside),
        )  # fmt: skip
        counts = [{name: getattr(dist, name).call_count for name in COLLECTIVES}]
        streams = [stream for stream in found if stream is not None]
        loss = sum((stream * 0.7).masked_fill(stream == -torch.inf, 0.0).sum() for stream in streams)
        (gradient,) = torch.autograd.grad(loss, buffer)
        counts += [{name: getattr(dist, name).call_count for name in COLLECTIVES}]
    return [stream.detach() for stream in streams], gradient, counts


@pytest.mark.parametrize("outside", ["minus_infinity", "keep", "ignore"])
@pytest.mark.parametrize(("with_ids", "dtype"), [(True, torch.float32), (False, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_filtered_logprobs_of_shards_equal_the_whole(ranks, size, with_ids, dtype, outside):
    wanted, want_gradient, _ = ranks.reference(filtered, outside, with_ids, dtype)
    results = ranks.run(size, filtered, outside, with_ids, dtype)
    for streams, _, (forward, both) in results:
        for stream, want in zip(streams, wanted, strict=True):
            torch.testing.assert_close(stream, want, rtol=2e-6, atol=2e-6)
        calls = {name: number for name, number in forward.items() if number}
        assert calls == {ALL_GATHER: 2, "all_reduce": 1 + with_ids} and both == forward
    gradient = torch.cat([part for _, part, _ in results], dim=1)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-5 if dtype == torch.float32 else 2.0**-7, atol=5e-6)
    assert (gradient != 0).any() and not gradient.isnan().any()

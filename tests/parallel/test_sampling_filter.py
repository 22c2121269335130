"""Sharded equals whole: thresholds of top-k and top-p, and what they cost in collectives."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_megatron.logprobs import SamplingFilter
from rl_megatron.logprobs.sampling_filter import filter_thresholds
from rl_megatron.logprobs.vocab_parallel import VocabShard

ROWS = 23


def make_logits(vocab, dtype):
    logits = 3 * torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(0))
    logits[1], logits[2, 3:], logits[3] = -torch.inf, -torch.inf, 1.0
    return logits.to(dtype)


def sharded(vocab, dtype, valid, sampling_filter):
    rank, size = dist.get_rank(), dist.get_world_size()
    logits = make_logits(vocab, dtype).chunk(size, dim=1)[rank]
    shard = VocabShard(rank * vocab // size, (rank + 1) * vocab // size, valid, dist.group.WORLD)
    temperature, active = torch.linspace(0.5, 2.0, ROWS), torch.arange(ROWS) != 5
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
        return filter_thresholds(logits, sampling_filter, shard, temperature, active), reduce.call_count


@pytest.mark.parametrize(
    ("sampling_filter", "rounds"),
    [
        (SamplingFilter(top_k=9), {torch.float32: 4, torch.bfloat16: 2, torch.float64: 8}),
        (SamplingFilter(top_p=0.8), {torch.float32: 5, torch.bfloat16: 3, torch.float64: 9}),
        (SamplingFilter(top_k=9, top_p=0.8), {torch.float32: 9, torch.bfloat16: 5, torch.float64: 17}),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_give_the_bits_of_the_whole(ranks, size, sampling_filter, rounds):
    for dtype, collectives in rounds.items():
        for valid in (120, 85):  # the last of four ranks then holds nothing but padding
            want, none = ranks.run(1, sharded, 120, dtype, valid, sampling_filter)[0]
            assert none == 0 and torch.isfinite(want).sum() >= ROWS - 3  # all but nothing, too few, and not active
            for found, calls in ranks.run(size, sharded, 120, dtype, valid, sampling_filter):
                assert torch.equal(found, want) and calls == collectives

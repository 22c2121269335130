"""Values of tokens reach the host of every rank, in blocks of bounded size, whatever the layout computed where."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from rl_megatron.batching.config import Batching
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology.collectives import ALL_GATHER
from rl_megatron.training import token_values
from tests.parallel.layouts import build_policy
from tests.parallel.test_layouts import random_batch

pytestmark = pytest.mark.change

BLOCK = 128  # bytes


def logprobs_and_top_k(parallel, batching, block_bytes):
    """Return logprobs, top-k logits and ids, and the bytes that each gather over data-parallel ranks received."""
    policy, batch = build_policy(parallel, batching=batching), random_batch(7, 16, 0)
    batch["input_lengths"][3] = 0
    batch["token_mask"][3] = 0
    gathered = []
    gather = getattr(dist, ALL_GATHER)

    def recorded(into, x, group, async_op=False):
        if group is policy.topology.groups.dp:
            gathered.append(into.nbytes)
        return gather(into, x, group=group, async_op=async_op)

    with mock.patch.object(token_values, "BLOCK_BYTES", block_bytes), mock.patch.object(dist, ALL_GATHER, recorded):
        found = policy.get_logprobs(batch) | policy.get_topk_logits(batch, 3)
    return BatchedDataDict(found), gathered


@pytest.mark.parametrize("kind", ["padded", "dynamic", "packed"])
@pytest.mark.parametrize("degrees", [{}, {"pipeline": 2}, {"context": 2}], ids=str)
def test_blocks_of_any_size_give_the_same_values_on_every_rank(ranks, degrees, kind):
    batching = Batching(kind, sequences=2, tokens=64)
    whole, _ = ranks.reference(logprobs_and_top_k, {}, Batching("padded", sequences=1), 1 << 20)
    size = 4 if degrees else 3
    for found, gathered in ranks.run(size, logprobs_and_top_k, degrees, batching, BLOCK):
        torch.testing.assert_close(found["logprobs"], whole["logprobs"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found["topk_logits"], whole["topk_logits"], rtol=1e-5, atol=1e-5)
        assert torch.equal(found["topk_indices"], whole["topk_indices"])
        assert len(gathered) > 4 and max(gathered) <= BLOCK
    (in_one, _), *_ = ranks.run(size, logprobs_and_top_k, degrees, batching, 1 << 20)
    assert all(torch.equal(in_one[key], found[key]) for key in in_one)

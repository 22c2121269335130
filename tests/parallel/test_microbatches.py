"""Pipelines with microbatches of different shapes: no rank hangs, and each stage receives what belongs to it."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.batching.config import Batching
from rl_megatron.batching.packing import pack_sequences
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import NLLLoss
from tests.parallel.layouts import VOCAB_SIZE, build_policy, gradients, worst_relative_error

BUDGET = 64
# The first half belongs to data-parallel rank 0 and fills many packages; the second half, of rank 1, fills one.
LENGTHS = [60, 50, 55, 48, 61, 40, 2, 3, 1, 4, 2, 5]


def skewed_batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(3)
    lengths, width = torch.tensor(LENGTHS), 64
    counts = torch.arange(width) < lengths[:, None]
    return BatchedDataDict(
        input_ids=torch.randint(0, VOCAB_SIZE, (len(LENGTHS), width), generator=generator),
        input_lengths=lengths,
        token_mask=counts.float(),
        sample_mask=torch.ones(len(LENGTHS)),
    )


def one_step(parallel: dict, batching: Batching):
    policy = build_policy(parallel, batching=batching)
    batch = skewed_batch()
    report = policy.accumulate_gradients(batch, NLLLoss())
    found = gradients(policy)
    return (
        len(policy.plan(batch, NLLLoss()).microbatches),
        report["loss"],
        found,
        policy.get_logprobs(batch)["logprobs"],
    )


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, one_step, {}, Batching("padded", len(LENGTHS)))[0]


def test_ranks_that_planned_alone_would_have_different_numbers_of_packages():
    alone = [len(pack_sequences(half, BUDGET)) for half in (LENGTHS[:6], LENGTHS[6:])]
    assert alone == [6, 1]


@pytest.mark.parametrize("kind", ["packed", "dynamic"])
@pytest.mark.parametrize(
    "parallel", [{"pipeline": 4}, {"pipeline": 2, "virtual_pipeline": 2, "tensor": 2}], ids=["pp4", "pp2 vpp2 tp2"]
)
def test_skewed_lengths_finish_with_the_gradients_of_one_process(ranks, one_process, parallel, kind):
    """All layouts use eight ranks, so data parallelism is 2."""
    _, wanted_loss, wanted, wanted_logprobs = one_process
    by_rank = ranks.run(8, one_step, parallel, Batching(kind, tokens=BUDGET))
    assert len({found[0] for found in by_rank}) == 1, "ranks have different numbers of microbatches"
    _, loss, found, logprobs = by_rank[0]
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    error, name = worst_relative_error(found, wanted)
    assert error <= 1e-4, name
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=0, atol=1e-5)


def test_two_interleaved_stages_do_not_mix_up_shapes(ranks, one_process):
    """With two stages, each stage is both the next and the previous stage of the other.

    megatron-core's exchange of shapes pairs a stage's first send with the other's first receive, even if they are for
    different directions (NVIDIA/Megatron-LM issue 1450).
    """
    by_rank = ranks.run(2, one_step, {"pipeline": 2, "virtual_pipeline": 2}, Batching("dynamic", tokens=BUDGET))
    assert [found[1] for found in by_rank] == pytest.approx([one_process[1]] * 2, rel=1e-6)

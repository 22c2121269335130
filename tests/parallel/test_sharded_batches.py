"""A batch whose sequences have owners trains a policy, and gets logprobs, as the whole batch does in one process."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl_megatron.batching.config import Batching
from rl_megatron.batching.exchange import is_first_of_replica
from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.batching.produced import produced
from rl_megatron.batching.sharded import ShardedBatch
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss
from rl_megatron.policy.megatron_policy import MegatronPolicy
from tests.parallel.layouts import MODEL, build_policy, gradients, weights, worst_relative_error
from tests.parallel.test_trajectories import batch_of, trajectory

LOSS_TOLERANCE, TOLERANCE, LOGPROB_TOLERANCE = 1e-5, 1e-4, 2e-5
PACKED, DYNAMIC, PADDED = Batching("packed", tokens=64), Batching("dynamic", tokens=96), Batching(sequences=2)
LAYOUTS = {
    "data 2 packed": (2, {}, PACKED),
    "data 2 padded": (2, {}, PADDED),
    "data 3 dynamic": (3, {}, DYNAMIC),
    "data 2 tensor 2 packed": (4, {"tensor": 2, "sequence": True}, PACKED),
    "data 2 context 2 packed": (4, {"context": 2}, PACKED),
    "data 2 pipeline 2 padded": (4, {"pipeline": 2}, PADDED),
}


def whole_batch() -> BatchedDataDict:
    """Return eight trajectories, some of which have two sequences, with all that a loss reads."""
    draw = random.Random(5)
    batch = batch_of([trajectory(draw) for _ in range(8)])
    for key in ("prev_logprobs", "reference_policy_logprobs"):
        del batch[key]
    return batch


def as_produced(batch: BatchedDataDict, policy: MegatronPolicy, everywhere: bool, store=None) -> ShardedBatch:
    """Return the batch as rank 0 has produced it, or uneven parts of it as every replica has."""
    topology = policy.topology
    if not is_first_of_replica(topology):
        return produced(None, topology, store)
    if not everywhere:
        return produced(batch if dist.get_rank() == 0 else None, topology, store)
    starts = [0, *np.flatnonzero(np.diff(batch["trajectory"].numpy())) + 1, batch.size]  # trajectories stay whole
    cuts = [starts[len(starts) * rank // (2 * topology.data)] for rank in range(topology.data)] + [batch.size]
    cuts[0] = 0
    return produced(batch.slice(cuts[topology.data_rank], cuts[topology.data_rank + 1]), topology, store)


def gathered(batch: ShardedBatch, keys) -> dict:
    """Return these keys of the global batch, and check that every sequence is on one replica and equal on its ranks."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (batch.numbers, {key: batch[key] for key in keys}))
    found: dict = {}
    for numbers, values in parts:
        for place, number in enumerate(numbers.tolist()):
            row = {key: values[key][place] for key in keys}
            for key, value in found.setdefault(number, row).items():
                assert torch.equal(value, row[key])
    assert sorted(found) == list(range(batch.size))
    assert sum(len(numbers) for numbers, _ in parts) == batch.size * dist.get_world_size() // batch.ranks.group.size()
    return {key: torch.stack([found[number][key] for number in range(batch.size)]) for key in keys}


def learn(parallel, batching, sharded, everywhere=False, units=False, sizes=None, model=MODEL, limit=None):
    """Return logprobs, training metrics, weights after training and gradients, of a whole batch or a sharded one."""
    policy, batch = build_policy(parallel, batching=batching, model=model), whole_batch()
    width = batch["input_ids"].size(1)
    sizes = sizes or [batch.size]
    store = TensorStore(limit)
    if sharded:
        owners = batch["trajectory"] if units else None
        batch = policy.distribute(as_produced(batch, policy, everywhere, store), sizes, owners)
        before = gathered(batch, [*batch.own])
        assert all(torch.equal(before[key], value) for key, value in whole_batch().items())
    policy.freeze_reference()
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    batch["reference_policy_logprobs"] = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    found = gathered(batch, ["prev_logprobs"]) if sharded else batch
    assert found["prev_logprobs"].shape[1] == width
    loss = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.05})
    policy.accumulate_gradients(batch, loss)
    of_whole = gradients(policy)
    report = policy.train(batch, loss, sizes=sizes)
    assert (store.directory is not None) == (limit is not None and sharded)
    store.close()
    return found["prev_logprobs"], report, weights(policy), of_whole


def assert_equal(found, wanted):
    assert (found[0] - wanted[0]).abs().max() <= LOGPROB_TOLERANCE
    for name in wanted[1].keys() - {"packing_efficiency"}:  # it depends on the microbatches
        assert found[1][name] == pytest.approx(wanted[1][name], rel=1e-4, abs=1e-6), name
    assert found[1]["loss"] == pytest.approx(wanted[1]["loss"], rel=LOSS_TOLERANCE, abs=1e-7)
    for ours, theirs in zip(found[2:], wanted[2:], strict=True):
        error, name = worst_relative_error(ours, theirs)
        assert error <= TOLERANCE, (name, error)


SIZES = [8, 8, 5]


@pytest.fixture(scope="module")
def one_process(ranks):
    return ranks.run(1, learn, {}, Batching(sequences=32), False, False, False, SIZES)[0]


@pytest.mark.parametrize("everywhere", [False, True], ids=["rank 0", "every replica"])
@pytest.mark.parametrize("units", [False, True], ids=["free", "trajectories"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_and_logprobs_equal_one_process(ranks, one_process, layout, units, everywhere):
    size, parallel, batching = LAYOUTS[layout]
    assert_equal(ranks.run(size, learn, parallel, batching, True, everywhere, units, SIZES)[0], one_process)

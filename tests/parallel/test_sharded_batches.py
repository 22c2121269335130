"""A batch whose sequences have owners trains a policy, and gets logprobs, as the whole batch does in one process."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.config import Batching
from rl_megatron.batching.exchange import is_first_of_replica
from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss
from rl_megatron.training.megatron_policy import MegatronPolicy
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
    shape = batch["input_ids"].shape  # a user's values of sequences, as many as a sequence has tokens
    batch["features"] = torch.rand(shape, generator=torch.Generator().manual_seed(6))
    return batch


def as_produced(batch: BatchedDataDict, policy: MegatronPolicy, everywhere: bool, store=None) -> Batch:
    """Return the batch as rank 0 has produced it, or uneven parts of it as every replica has."""
    topology = policy.topology
    if not is_first_of_replica(topology):
        return Batch.gather_facts(None, topology, store)
    if not everywhere:
        return Batch.gather_facts(batch if dist.get_rank() == 0 else None, topology, store)
    starts = [0, *np.flatnonzero(np.diff(batch["trajectory"].numpy())) + 1, batch.size]  # trajectories stay whole
    cuts = [starts[len(starts) * rank // (2 * topology.data)] for rank in range(topology.data)] + [batch.size]
    cuts[0] = 0
    return Batch.gather_facts(batch.slice(cuts[topology.data_rank], cuts[topology.data_rank + 1]), topology, store)


def gathered(batch: Batch, keys) -> dict:
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
    assert batch.ranks.group is not None
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
        before = gathered(batch, [*batch.local])
        assert all(torch.equal(before[key], value) for key, value in whole_batch().items())
        part = batch.take_sequences(batch.numbers.tolist(), 3)
        assert part["input_ids"].size(1) == 3 and torch.equal(part["features"], batch["features"])
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


def logprobs_of_parts(parallel, batching, sharded):
    """Return the logprobs of some neighbours of the batch, of which ranks do not have equally many."""
    policy, found = build_policy(parallel, batching=batching), []
    for start, stop in ((0, 7), (0, 8), (8, 15)):
        part = whole_batch().slice(start, stop)
        if sharded:
            part = policy.distribute(as_produced(part, policy, False), [part.size])
        part["prev_logprobs"] = policy.get_logprobs(part)["logprobs"]
        found.append(gathered(part, ["prev_logprobs"])["prev_logprobs"] if sharded else part["prev_logprobs"])
    return found


@pytest.mark.fast
@pytest.mark.parametrize("layout", ["data 2 packed", "data 2 padded", "data 3 dynamic"])
def test_a_rank_with_fewer_sequences_computes_the_logprobs_of_its_own(ranks, layout):
    size, parallel, batching = LAYOUTS[layout]
    wanted = ranks.run(1, logprobs_of_parts, {}, Batching(sequences=32), False)[0]
    for found, of_part in zip(ranks.run(size, logprobs_of_parts, parallel, batching, True)[0], wanted, strict=True):
        assert (found - of_part).abs().max() <= LOGPROB_TOLERANCE


def positive_steps(parallel, batching, sharded, sizes, counts=None):
    """Return metrics and gradients of each step of a loss that is partly a mean over tokens of rewarded samples."""
    batch = whole_batch()
    batch["rewards"] = torch.tensor([1.0, -1.0, 0.0, 2.0, -0.5] * 5)[: batch.size]
    batch["sample_mask"][3] = 0.0
    policy = build_policy(parallel, batching=batching)
    loss = build_loss("clipped_pg", {"positive_example_nll_weight": 0.7, "reference_policy_kl_penalty": 0.0})
    found, start = [], 0
    for step, size in enumerate(sizes):
        part = batch.slice(start, start + size)
        part = policy.distribute(as_produced(part, policy, False), [size]) if sharded else part
        if counts is not None:
            part["global_positive_toks"] = torch.full((size,), float(counts[step]))
        part["prev_logprobs"] = policy.get_logprobs(part)["logprobs"]
        metrics = policy.accumulate_gradients(part, loss)
        found.append((metrics, gradients(policy)))
        start += size
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]  # and in one call, which cuts the batch itself
    whole = policy.distribute(as_produced(batch, policy, False), sizes) if sharded else batch
    if counts is not None:
        repeated = torch.tensor(counts, dtype=torch.float32).repeat_interleave(torch.tensor(sizes))
        whole["global_positive_toks"] = repeated
    found.append((policy.train(whole, loss, sizes=sizes), weights(policy)))
    return found


@pytest.fixture(scope="module")
def counted_by_hand(ranks):
    """What one process learns in one microbatch, if the test counts the tokens of rewarded samples."""
    batch, counts = whole_batch(), []
    for start, stop in pairwise(accumulate(SIZES, initial=0)):
        rewarded = [number for number in range(start, stop) if number % 5 in (0, 3) and number != 3]
        counts.append(sum(int(batch["token_mask"][number, 1:].sum()) for number in rewarded))
    assert len(set(counts)) == len(SIZES) and min(counts) > 0
    return ranks.run(1, positive_steps, {}, Batching(sequences=32), False, SIZES, counts)[0]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("layout", ["data 2 packed", "data 2 padded", "data 3 dynamic", "data 2 context 2 packed"])
def test_tokens_of_rewarded_samples_are_counted_over_the_global_batch_of_each_step(
    ranks, counted_by_hand, layout, sharded
):
    size, parallel, batching = LAYOUTS[layout]
    found = ranks.run(size, positive_steps, parallel, batching, sharded, SIZES)[0]
    for (metrics, values), (wanted_metrics, wanted) in zip(found, counted_by_hand, strict=True):
        for name in ("loss", "positive_nll_loss"):
            assert metrics[name] == pytest.approx(wanted_metrics[name], rel=LOSS_TOLERANCE), name
        error, name = worst_relative_error(values, wanted)
        assert error <= TOLERANCE, (name, error)


def test_sequences_beyond_the_limit_of_memory_are_in_files(ranks, one_process):
    """The limit of 4 kB holds some tensors of a rank, so that both kinds are read."""
    found = ranks.run(2, learn, {}, PACKED, True, False, False, SIZES, MODEL, 4096)[0]
    assert_equal(found, one_process)


def test_a_rank_without_sequences_computes_padding_sequences(ranks):
    whole = ranks.run(1, few, {}, False)[0]
    for found in ranks.run(3, few, {}, True):
        assert found == pytest.approx(whole, rel=LOSS_TOLERANCE)


def few(parallel, sharded) -> float:
    """Return the loss of two sequences, of which three ranks cannot all have one."""
    policy, batch = build_policy(parallel, batching=PACKED), whole_batch().slice(0, 2)
    if sharded:
        batch = policy.distribute(as_produced(batch, policy, False))
        assert len(batch.numbers) <= 1
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    return policy.train(batch, build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0}))["loss"]


def moved_bytes(parallel) -> tuple[int, int, int, list[int]]:
    """Return the bytes that a rank sent and received, those of its sequences, and the owners of all."""
    policy, batch = build_policy(parallel, batching=PACKED), whole_batch()
    found = policy.distribute(as_produced(batch, policy, False))
    own = dict(found.local)
    of_sequences = {key for key, value in own.items() if value.dim() == 1} | {"features"}
    tokens = int(found.lengths[found.numbers].sum())
    held = sum(tokens * own[key].element_size() for key in own.keys() - of_sequences)
    held += sum(own[key].nbytes for key in of_sequences)
    return found.traffic.sent, found.traffic.received, held, found.owners.tolist()


def test_every_sequence_is_sent_once_without_padding_to_its_owner(ranks):
    found = ranks.run(3, moved_bytes, {})
    facts = 21 * (4 + 4 + 1 + 1 + 4 + 4)  # input_lengths, rewards, sample_mask, stopped, trajectory, sampled_tokens
    counts = 3 * 2 * 8
    for rank, (sent, received, held, owners) in enumerate(found):
        assert owners == found[0][3]
        assert received == facts + counts + (held if rank else 0)
        assert sent == (0 if rank else found[1][2] + found[2][2])


def test_the_ranks_of_a_replica_get_the_sequences_from_its_first_rank(ranks):
    found = ranks.run(4, moved_bytes, {"tensor": 2})
    assert [sent > 0 for sent, *_ in found] == [True, False, False, False]
    assert found[0][2] == found[1][2] and found[2][2] == found[3][2]
    assert found[1][1] - found[0][1] == found[1][2]  # rank 0 had its own part
    assert found[3][1] == found[2][1]


def brought_back(parallel) -> tuple[list, list]:
    """Return the first tokens of what comes back to the ranks that produced it, and of what they had produced."""
    policy, batch = build_policy(parallel, batching=PACKED), whole_batch()
    drawn = as_produced(batch, policy, True)
    before = drawn.local["advantages"].tolist() if len(drawn.numbers) else []
    owned = policy.distribute(drawn)
    found = owned.gather_at_homes(["advantages"])["advantages"]
    return found.tolist(), before


@pytest.mark.parametrize("layout", ["data 3 dynamic", "data 2 context 2 packed"])
def test_values_come_back_to_the_ranks_that_have_produced_their_sequences(ranks, layout):
    size, parallel, _ = LAYOUTS[layout]
    found = ranks.run(size, brought_back, parallel)
    assert sum(len(before) for _, before in found) == whole_batch().size
    for back, before in found:
        assert not before or back == before


def largest_difference_of_logprobs() -> float:
    """Return by how much logprobs of a batch whose sequences have owners differ from those of the whole batch."""
    policy, batch = build_policy({"pipeline": 2}, batching=PADDED), whole_batch()
    wanted = policy.get_logprobs(batch)["logprobs"]
    owned = policy.distribute(as_produced(batch, policy, False))
    found = policy.get_logprobs(owned)["logprobs"]
    return (found - wanted[owned.numbers]).abs().max().item()


def test_all_stages_of_a_pipeline_get_the_logprobs_of_their_sequences(ranks):
    assert max(ranks.run(2, largest_difference_of_logprobs)) <= LOGPROB_TOLERANCE


def numbers_of_trajectories() -> list[int]:
    """Return the numbers over all ranks, if rank 0 has a trajectory of two sequences, and rank 1 one of a sequence."""
    topology = build_policy({}).topology
    size = 2 - topology.data_rank
    own = BatchedDataDict(
        input_ids=torch.ones(size, 4).long(), input_lengths=torch.full((size,), 4), trajectory=torch.zeros(size).long()
    )
    batch = Batch.gather_facts(own, topology)
    assert batch["trajectory"].tolist() == [topology.data_rank] * size
    return batch.facts["trajectory"].tolist()


def test_trajectories_of_two_ranks_have_numbers_of_their_own(ranks):
    assert ranks.run(2, numbers_of_trajectories) == [[0, 0, 1]] * 2

"""Planning of ownership.

It is deterministic, every sequence has one owner, groups stay whole, and ranks and blocks of ranks are balanced.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_megatron.batching.balance import imbalance
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.blocks import Blocks, assign_blocks, deal_to_blocks
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import PADDING, RankMicrobatches, StepPlan
from rl_megatron.batching.ownership import OwnershipPlanner, agree_on_counts, plan_ownership
from rl_megatron.batching.rank_plan import plan_lengths
from rl_megatron.batching.shared_prefixes import NEIGHBOUR, SHARED, SharedPrefixes
from rl_megatron.batching.step_microbatches import plan_microbatches
from rl_megatron.topology.reductions import ALONE

LAYOUT: Any = SimpleNamespace(context=1, sequence=False, sequence_multiple=1, data=1)
COST = SequenceCost(per_token=1.0, per_pair=1e-4)
KINDS = [Batching("packed", tokens=256), Batching("dynamic", tokens=256), Batching("padded", sequences=3)]


def planner(lengths, ranks, batching, groups=None, ranks_per_block=8) -> OwnershipPlanner:
    lengths = np.array(lengths, dtype=np.int32)
    blocks = Blocks(ranks, ranks_per_block)
    return OwnershipPlanner(lengths, 256, batching, LAYOUT, COST, blocks, groups=groups)


def plan_of_all_blocks(plan: OwnershipPlanner, start: int, stop: int, homes: np.ndarray):
    """Return (the owner of each sequence of a step, the microbatches of each rank), as all blocks plan them."""
    given_away: list[np.ndarray] = []
    for block in range(len(plan.blocks)):
        plan.assign_blocks(start, stop, homes, block, lambda moves: given_away.append(moves) or moves)
    moves = np.concatenate(given_away) if given_away else np.zeros((0, 2), dtype=np.int64)
    block_of = plan.assign_blocks(start, stop, homes, 0, lambda _: moves)
    owners, shapes = np.full(stop - start, -1), []
    for block in range(len(plan.blocks)):
        numbers, ranks = np.flatnonzero(block_of == block), plan.blocks.ranks(block)
        local, of_ranks = plan.plan_block(start + numbers, len(ranks))
        owners[numbers] = ranks.start + local
        shapes += of_ranks
    return owners, shapes


@pytest.mark.parametrize("batching", KINDS, ids=lambda batching: batching.kind)
def test_sequences_that_share_tokens_are_divided_over_blocks(batching):
    shared = np.full(256, 20, dtype=np.int32)
    shared[0] = 0
    neighbours = np.where(shared > 0, -1, 0)
    prefixes = SharedPrefixes({NEIGHBOUR: torch.from_numpy(neighbours), SHARED: torch.from_numpy(shared)})
    plan = replace(planner([40] * 256, 16, replace(batching, share_prefixes=True)), prefixes=prefixes)
    owners, _ = plan_of_all_blocks(plan, 0, 256, np.zeros(256, dtype=np.int64))
    of_block = [int(np.isin(owners, plan.blocks.ranks(block)).sum()) for block in range(2)]
    assert max(of_block) <= 144, of_block


@st.composite
def cases(draw):
    ranks = draw(st.integers(1, 40))
    number = draw(st.integers(1, 200))
    lengths = draw(st.lists(st.integers(0, 256), min_size=number, max_size=number))
    produced = draw(st.sampled_from(["rank 0", "evenly", "anywhere"]))
    if produced == "rank 0":
        homes = np.zeros(number, dtype=np.uint16)
    elif produced == "evenly":
        homes = (np.arange(number) * ranks // number).astype(np.uint16)
    else:
        found = draw(st.lists(st.integers(0, ranks - 1), min_size=number, max_size=number))
        homes = np.array(found, dtype=np.uint16)
    return lengths, ranks, homes, draw(st.sampled_from(KINDS))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_sequence_has_one_owner_and_is_in_one_of_its_microbatches(case):
    lengths, ranks, homes, batching = case
    found = plan_of_all_blocks(planner(lengths, ranks, batching), 0, len(lengths), homes)
    again = plan_of_all_blocks(planner(lengths, ranks, batching), 0, len(lengths), homes)
    owners, shapes = found
    assert (owners == again[0]).all() and shapes == again[1]
    assert owners.min() >= 0 and owners.max() < ranks and len(shapes) == ranks
    most = max(len(each.sequences) for each in shapes)
    for rank, of_rank in enumerate(shapes):
        numbers = sorted(each for each in chain.from_iterable(of_rank.sequences) if each != PADDING)
        assert numbers == np.flatnonzero(owners == rank).tolist()
        extended = of_rank.extend(most, 1)
        assert len(extended.sequences) == len(extended.widths) == most and all(extended.sequences)
        left = sorted(each for each in chain.from_iterable(extended.sequences) if each != PADDING)
        assert left == numbers


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(1, 7))
def test_neighbours_that_belong_together_have_one_owner(case, size):
    lengths, ranks, homes, batching = case
    groups = np.arange(len(lengths)) // size
    homes = homes[groups * size]  # a group is produced on one rank
    owners, _ = plan_of_all_blocks(planner(lengths, ranks, batching, groups), 0, len(lengths), homes)
    for group in range(groups[-1] + 1):
        assert len(set(owners[groups == group].tolist())) == 1
    assert owners.min() >= 0


@pytest.mark.parametrize("produced", ["rank 0", "evenly"])
@pytest.mark.parametrize("ranks", [8, 20, 64, 256])
def test_ranks_have_nearly_the_same_cost(ranks, produced):
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 257, 64 * ranks)
    homes = np.zeros(len(lengths), dtype=int) if produced == "rank 0" else np.arange(len(lengths)) // 64
    owners, _ = plan_of_all_blocks(planner(lengths, ranks, Batching("packed", tokens=1024)), 0, len(lengths), homes)
    costs = np.bincount(owners, weights=[COST(int(length)) for length in lengths], minlength=ranks)
    assert imbalance(costs.tolist()) <= 0.01


def test_sequences_mostly_stay_in_the_block_that_has_produced_them():
    rng, ranks = np.random.default_rng(0), 64
    lengths, homes = rng.integers(20, 257, 64 * ranks), np.arange(64 * ranks) // 64
    owners, _ = plan_of_all_blocks(planner(lengths, ranks, Batching("packed", tokens=1024)), 0, len(lengths), homes)
    assert (owners // 8 == homes // 8).mean() >= 0.95


@pytest.mark.parametrize("batching", KINDS, ids=lambda each: each.kind)
def test_one_block_plans_as_a_whole_batch_is_planned(batching):
    lengths = np.random.default_rng(1).integers(1, 257, 50)
    ownership = plan_ownership(planner(lengths, 4, batching), [30, 20], np.zeros(50, dtype=np.uint16), 2, ALONE)
    for step, start in zip(ownership.steps, (0, 30), strict=True):
        part = lengths[start : step.stop].tolist()
        planned = plan_lengths(part, 256, batching, LAYOUT, 4, 1, COST)
        wanted = [
            [start + each if each < len(part) else PADDING for each in chosen] for chosen in planned.plan.sequences[2]
        ]
        assert step.local.sequences == wanted and step.efficiency == pytest.approx(planned.efficiency)


def test_a_padding_sequence_of_a_packed_microbatch_is_one_token_long():
    lengths = torch.tensor([5, 3, 7])
    ids, sample_mask = torch.ones(3, 8).long(), torch.ones(3)
    batch = Batch.from_whole({"input_ids": ids, "input_lengths": lengths, "sample_mask": sample_mask})
    shapes = RankMicrobatches([[0, 2], [1, PADDING]], [8, 8], tokens=15, slots=16, largest=8)
    plan = plan_microbatches(batch, StepPlan(0, 3, KINDS[0], 1, [shapes], 1.0))
    assert [microbatch.lengths for microbatch in plan.microbatches] == [(5, 7), (3, 1)]
    assert plan.microbatches[1].batch["sample_mask"].tolist() == [1, 0]


def test_each_optimizer_step_is_spread_over_all_ranks():
    sizes = [64, 64, 40]
    lengths = np.random.default_rng(2).integers(20, 257, sum(sizes))
    ownership = plan_ownership(planner(lengths, 8, KINDS[0]), sizes, np.zeros(len(lengths), dtype=np.uint16), 0, ALONE)
    for start, stop in ((0, 64), (64, 128), (128, 168)):
        costs = [
            sum(COST(int(each)) for each in lengths[start:stop][ownership.owners[start:stop] == r]) for r in range(8)
        ]
        assert imbalance(costs) < 0.1


def test_a_block_gives_what_it_has_too_much():
    costs, homes = np.array([4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]), np.array([0, 0, 0, 1, 1, 2, 2])
    blocks = Blocks(3, 1)
    assert sorted(np.bincount(deal_to_blocks(costs, homes, blocks), weights=costs)) == [3.0, 4.0, 5.0]
    even = np.array([3.0, 3.0, 2.0, 3.0, 2.0, 3.0, 2.0])
    given_away = []
    assign_blocks(even, homes, blocks, 0, lambda moves: given_away.append(moves.tolist()) or moves)
    assert given_away == [[[2, 2]]]  # 8, 5 and 5 become 6, 5 and 7


def test_ranks_agree_on_the_number_of_microbatches_and_on_the_efficiency():
    """The other rank has one microbatch more, and computes 32 slots for its 12 tokens."""
    own = RankMicrobatches(sequences=[[0, 1]], widths=[4], tokens=6, slots=8, largest=8)
    others: Any = SimpleNamespace(max=lambda counts: counts + 1, sum=lambda totals: totals + torch.tensor([[12, 32]]))
    ((agreed, efficiency),) = agree_on_counts([own], group_size=1, ranks=others)
    assert agreed.sequences == [[0], [1]]
    assert efficiency == (6 + 12) / (8 + 32)

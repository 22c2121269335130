"""Plan which data-parallel rank owns each sequence of a global batch, and how each rank's sequences form microbatches.

Every sequence has one owner, which computes its logprobs and values and trains on it. All ranks know the length of
every sequence and the rank that produced it, so their plans agree. Each rank plans only for its own block of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
import torch.distributed as dist

from rl_megatron.batching.blocks import Blocks, GatherMoves, assign_blocks, deal_to_ranks
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import PADDING, RankMicrobatches, StepPlan
from rl_megatron.batching.packing import round_up
from rl_megatron.batching.rank_plan import LengthPlan, plan_lengths
from rl_megatron.batching.shared_prefixes import SharedPrefixes
from rl_megatron.topology.collectives import gather_from_ranks
from rl_megatron.topology.degrees import SequenceLayout
from rl_megatron.topology.reductions import RankReduction


@dataclass(frozen=True)
class Ownership:
    """The owner of each sequence of a global batch.

    Attributes:
        owners: [B] The data-parallel rank that owns each sequence.
        steps: The plan of each optimizer step on this rank; empty if `plan_step` plans each step later.
    """

    owners: np.ndarray
    steps: list[StepPlan]


def _cut_chains(chains: np.ndarray, costs: np.ndarray, most: float) -> np.ndarray:
    """Return a number for each sequence, equal for neighbours of a chain, but only up to a cost of about `most`."""
    earlier_costs = np.cumsum(costs, dtype=np.float64) - costs
    begins = np.r_[True, chains[1:] != chains[:-1]]
    since_begin = earlier_costs - earlier_costs[np.maximum.accumulate(np.where(begins, np.arange(len(chains)), 0))]
    parts = since_begin // most
    return np.cumsum(np.r_[True, (chains[1:] != chains[:-1]) | (parts[1:] != parts[:-1])])


@dataclass(frozen=True)
class OwnershipPlanner:
    """A planner of the ownership of a global batch, from the lengths of its sequences.

    Attributes:
        lengths: [B] The tokens of each sequence.
        width: The columns of the global batch.
        group_size: The number of consecutive sequences that stay together in a microbatch.
        groups: [B] A number for each sequence. Consecutive sequences with the same number, such as those of a
            trajectory, have the same owner, but may be in different microbatches. None: groups of `group_size`.
        prefixes: What the sequences have in common in this layout; None: nothing.
    """

    lengths: np.ndarray
    width: int
    batching: Batching
    layout: SequenceLayout
    cost: SequenceCost
    blocks: Blocks
    group_size: int = 1
    groups: np.ndarray | None = None
    prefixes: SharedPrefixes | None = None

    @property
    def plans_microbatches(self) -> bool:
        """Return whether a plan of microbatches decides the owners: if there are no `groups`, or only one rank."""
        return self.groups is None or self.blocks.num_ranks == 1

    def assign_blocks(self, start: int, stop: int, homes: np.ndarray, block: int, gather: GatherMoves) -> np.ndarray:
        """Return the block of ranks that gets each sequence of one optimizer step, from `start` to `stop - 1`.

        `homes` [B] has the rank that produced each sequence of the global batch. See the function `assign_blocks`.
        """
        if len(self.blocks) == 1:
            return np.zeros(stop - start, dtype=np.int64)
        costs, homes = self._costs(self.lengths[start:stop]), homes[start:stop]
        if self.groups is not None:
            groups = self.groups[start:stop]
        elif self.group_size > 1:
            groups = np.arange(stop - start) // self.group_size
        elif self.prefixes is not None:
            costs -= self._costs(self.prefixes.shared[start:stop])
            groups = _cut_chains(self.prefixes.chain[start:stop], costs, costs.sum() / self.blocks.num_ranks)
        else:
            return assign_blocks(costs, homes, self.blocks, block, gather)
        first = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        assigned = assign_blocks(np.add.reduceat(costs, first), homes[first], self.blocks, block, gather)
        return np.repeat(assigned, np.diff(np.r_[first, stop - start]))

    def plan_block(self, numbers: np.ndarray, num_ranks: int) -> tuple[np.ndarray, list[RankMicrobatches]]:
        """Return (each sequence's rank within the block, the microbatches of each of these ranks).

        `numbers` are the indices in the global batch of the block's sequences of one optimizer step, ascending. Unless
        `plans_microbatches`, the list of microbatches is empty.
        """
        if not self.plans_microbatches:
            groups = self.groups[numbers]  # pyright: ignore[reportOptionalSubscript]  # `groups` is not None here
            first = (
                np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]]) if len(groups) else np.zeros(0, dtype=np.int64)
            )
            costs = np.add.reduceat(self._costs(self.lengths[numbers]), first) if len(groups) else np.zeros(0)
            group_ranks = np.array(deal_to_ranks(costs.tolist(), num_ranks), dtype=np.int64)
            return np.repeat(group_ranks, np.diff(np.r_[first, len(numbers)])), []
        if not len(numbers):
            size = self.group_size
            padding = RankMicrobatches([[PADDING] * size], [self.layout.sequence_multiple], 0, size, size)
            return np.zeros(0, dtype=np.int64), [padding] * num_ranks
        lengths = self.lengths[numbers].tolist()
        prefixes = None if self.prefixes is None else self.prefixes.take(numbers)
        planned = plan_lengths(
            lengths, self.width, self.batching, self.layout, num_ranks, self.group_size, self.cost, prefixes
        )
        owners = np.zeros(len(numbers), dtype=np.int64)
        for owner, microbatches in enumerate(planned.plan.sequences):
            owned = np.array(list(chain.from_iterable(microbatches)))
            owners[owned[owned < len(numbers)]] = owner
        ranks = build_rank_microbatches(planned, numbers.tolist(), lengths, self.layout)
        for members in chain.from_iterable(rank.sequences for rank in ranks):
            members.sort(key=lambda number: number == PADDING)
        return owners, ranks

    def _costs(self, lengths: np.ndarray) -> np.ndarray:
        if self.batching.kind == "padded" and self.prefixes is None:  # every sequence is as wide as the batch
            return np.ones(len(lengths), dtype=np.float32)
        length = lengths.astype(np.float32)  # exact enough for a balance, and twice as fast as fp64 for many sequences
        costs = length * np.float32(self.cost.per_pair)
        costs += np.float32(self.cost.per_token)
        costs *= length
        return costs

    def check_longest(self) -> None:
        """Raise ConfigError on all ranks if a group alone exceeds `batching.tokens`, whichever block has the group."""
        size = self.group_size
        tokens = self.lengths[: len(self.lengths) // size * size]
        if size > 1:
            tokens = tokens.reshape(-1, size)
            tokens = tokens[(tokens.max(1) if self.batching.kind == "dynamic" else tokens.sum(1)).argmax()]
        else:
            tokens = tokens[tokens.argmax() :][:1]
        plan_lengths(tokens.tolist(), self.width, self.batching, self.layout, 1, size, self.cost)


def build_rank_microbatches(
    planned: LengthPlan, numbers: Sequence[int], lengths: Sequence[int], layout: SequenceLayout
) -> list[RankMicrobatches]:
    """Return the microbatches of each rank, with `PADDING` for each padding sequence.

    Each planned sequence has its index in the global batch in `numbers`, and its length in `lengths`.
    """
    numbers = [*numbers, *[PADDING] * (len(planned.lengths) - len(numbers))]
    ranks = []
    plan = planned.plan
    for microbatches, widths, slots in zip(plan.sequences, plan.lengths, plan.slots, strict=True):
        tokens = sum(lengths[index] for index in chain.from_iterable(microbatches) if index < len(lengths))
        computed = sum(round_up(count, layout.sequence_multiple) for count in slots)
        sequences = [[numbers[index] for index in members] for members in microbatches]
        ranks.append(RankMicrobatches(sequences, widths, tokens, computed, max(slots), planned.shares_prefixes))
    return ranks


def plan_ownership(
    planner: OwnershipPlanner, sizes: Sequence[int], homes: np.ndarray, rank: int, ranks: RankReduction
) -> Ownership:
    """Return the owner of each sequence. Collective if there are several blocks.

    Args:
        planner: The planner of the global batch.
        sizes: The number of sequences of each optimizer step. Each step is spread evenly over the ranks.
        homes: [B] The data-parallel rank on which each sequence was produced.
        rank: This data-parallel rank.
        ranks: The data-parallel ranks.

    Raises:
        ConfigError: A group alone exceeds `batching.tokens`.
    """
    planner.check_longest()
    blocks = planner.blocks
    block = blocks.find_block(rank)
    members = blocks.ranks(block)
    local = np.zeros(len(planner.lengths), dtype=np.uint8)  # owners of this block's sequences, as ranks in the block
    assigned = np.zeros(len(planner.lengths), dtype=np.uint16)
    planned: list[list[RankMicrobatches]] = []  # for each step, the microbatches of the block's ranks
    ends = np.cumsum([0, *sizes]).tolist()
    for start, stop in pairwise(ends):
        assigned[start:stop] = planner.assign_blocks(
            start, stop, homes, block, lambda moves: _gather_moves(moves, members, rank, ranks)
        )
        numbers = start + np.flatnonzero(assigned[start:stop] == block)
        local[numbers], microbatches = planner.plan_block(numbers, len(members))
        planned.append(microbatches)
    if len(blocks) > 1:
        local = _sum_over_ranks(local if rank == members.start else np.zeros_like(local), ranks)
    owners = assigned * np.uint16(blocks.ranks_per_block)
    owners += local
    if not planner.plans_microbatches:
        return Ownership(owners, [])
    if len(blocks) > 1:
        agreed = agree_on_counts([step[rank - members.start] for step in planned], planner.group_size, ranks)
    else:
        agreed = [
            (step[rank], sum(member.tokens for member in step) / sum(member.slots for member in step))
            for step in planned
        ]
    steps = [
        StepPlan(
            start, stop, planner.batching, planner.group_size, [microbatches], efficiency, prefixes=planner.prefixes
        )
        for (start, stop), (microbatches, efficiency) in zip(pairwise(ends), agreed, strict=True)
    ]
    return Ownership(owners, steps)


def agree_on_counts(
    steps: Sequence[RankMicrobatches], group_size: int, ranks: RankReduction
) -> list[tuple[RankMicrobatches, float]]:
    """Return (this rank's microbatches, all ranks' efficiency) per step.

    All ranks get the same number of microbatches. Collective.
    """
    most = ranks.max(torch.tensor([len(step.sequences) for step in steps])).tolist()
    steps = [step.extend(count, group_size) for step, count in zip(steps, most, strict=True)]
    totals = ranks.sum(torch.tensor([[step.tokens, step.slots] for step in steps])).tolist()
    return [(step, tokens / slots) for step, (tokens, slots) in zip(steps, totals, strict=True)]


def _gather_moves(moves: np.ndarray, members: range, rank: int, ranks: RankReduction) -> np.ndarray:
    """Return the moves from all blocks, [k, 2]. Each rank of a block contributes a part of the block's moves."""
    part = moves[rank - members.start :: len(members)]
    most = int(ranks.max(torch.tensor([len(part)])).item())
    padded = torch.full((most, 2), -1, dtype=torch.int32)
    padded[: len(part)] = torch.from_numpy(part)
    gathered = gather_from_ranks(padded.to(ranks.device), ranks.group).flatten(0, 1).cpu().numpy()
    return gathered[gathered[:, 0] >= 0].astype(np.int64)


def _sum_over_ranks(local: np.ndarray, ranks: RankReduction) -> np.ndarray:
    """Return the sum over all ranks. Only the first rank of each block passes nonzero numbers."""
    total = torch.from_numpy(local).to(ranks.device)
    dist.all_reduce(total, group=ranks.group)
    return total.cpu().numpy()

"""Plan which data-parallel rank owns which sequences of a global batch, and how its sequences form microbatches.

Every sequence has one owner, which computes its logprobs and values and trains on it. The plan follows from the lengths
of all sequences alone, so that all ranks make the same one. Each rank plans only for its own block of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np
import torch
import torch.distributed as dist

from rl_megatron.batching.blocks import BLOCK_RANKS, Blocks, Gifts, blocks_of, deal_to_ranks
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.packing import round_up
from rl_megatron.batching.rank_plan import LengthPlan, plan_lengths
from rl_megatron.batching.step_plan import PADDING, Shapes, StepPlan
from rl_megatron.topology.collectives import gather_from_ranks
from rl_megatron.topology.degrees import SequenceLayout
from rl_megatron.topology.reductions import RankReduction


@dataclass(frozen=True)
class Ownership:
    """Who owns what.

    Attributes:
        owners: [B] The data-parallel rank that owns each sequence.
        steps: How each optimizer step is planned on this rank; empty if it is planned when it is taken.
    """

    owners: np.ndarray
    steps: list[StepPlan]


@dataclass(frozen=True)
class OwnershipPlanner:
    """Plans the ownership of a global batch of which only lengths are known.

    Attributes:
        lengths: [B] The tokens of each sequence.
        width: The columns of the global batch.
        batching: How sequences form microbatches.
        layout: The layout.
        cost: The cost of a sequence.
        group_size: Sequences in a row that stay together in a microbatch.
        groups: [B] A number for each sequence, the same for neighbours that one rank must own, such as the sequences of
            a trajectory. They may be in different microbatches. None: nothing but `group_size` holds.
        blocks: The data-parallel ranks in blocks.
    """

    lengths: np.ndarray
    width: int
    batching: Batching
    layout: SequenceLayout
    cost: SequenceCost
    blocks: Blocks
    group_size: int = 1
    groups: np.ndarray | None = None

    @property
    def plans_microbatches(self) -> bool:
        """Return whether ownership follows from a plan of microbatches, as it does for sequences that are free."""
        return self.groups is None or self.blocks.num_ranks == 1

    def block_of(self, start: int, stop: int, homes: np.ndarray, mine: int, exchange: Gifts) -> np.ndarray:
        """Return the block of each sequence from `start` to `stop - 1`, which are those of one optimizer step.

        Args:
            start: The first sequence.
            stop: The number behind the last one.
            homes: [B] The rank on which each sequence was produced.
            mine: The block of this rank.
            exchange: See `blocks_of`.
        """
        if len(self.blocks) == 1:
            return np.zeros(stop - start, dtype=np.int64)
        costs, homes = self._costs(self.lengths[start:stop]), homes[start:stop]
        if self.groups is None and self.group_size == 1:
            return blocks_of(costs, homes, self.blocks, mine, exchange)
        groups = self._groups_of(start, stop)
        first = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
        found = blocks_of(np.add.reduceat(costs, first), homes[first], self.blocks, mine, exchange)
        return np.repeat(found, np.diff(np.r_[first, stop - start]))

    def of_block(self, numbers: np.ndarray, num_ranks: int) -> tuple[np.ndarray, list[Shapes]]:
        """Return (the rank within the block of each of its sequences, the microbatches of each of these ranks).

        Args:
            numbers: The numbers of the block's sequences of one optimizer step, in order.
            num_ranks: The ranks of the block.
        """
        if not self.plans_microbatches:
            groups = self.groups[numbers]  # pyright: ignore[reportOptionalSubscript]  # there are groups then
            first = (
                np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]]) if len(groups) else np.zeros(0, dtype=np.int64)
            )
            costs = np.add.reduceat(self._costs(self.lengths[numbers]), first) if len(groups) else np.zeros(0)
            of_groups = np.array(deal_to_ranks(costs.tolist(), num_ranks), dtype=np.int64)
            return np.repeat(of_groups, np.diff(np.r_[first, len(numbers)])), []
        if not len(numbers):
            return np.zeros(0, dtype=np.int64), [self.nothing()] * num_ranks
        lengths = self.lengths[numbers].tolist()
        planned = plan_lengths(lengths, self.width, self.batching, self.layout, num_ranks, self.group_size, self.cost)
        owners = np.zeros(len(numbers), dtype=np.int64)
        for rank, microbatches in enumerate(planned.plan.sequences):
            own = np.array(list(chain.from_iterable(microbatches)))
            owners[own[own < len(numbers)]] = rank
        shapes = [
            replace(
                of_rank,
                sequences=[sorted(chosen, key=lambda number: number == PADDING) for chosen in of_rank.sequences],
            )
            for of_rank in rank_shapes(planned, numbers.tolist(), lengths, self.layout)
        ]
        return owners, shapes

    def nothing(self) -> Shapes:
        """Return the microbatch of a rank that owns no sequence: padding with zero loss weight."""
        return Shapes(
            [[PADDING] * self.group_size], [self.layout.sequence_multiple], 0, self.group_size, self.group_size
        )

    def _groups_of(self, start: int, stop: int) -> np.ndarray:
        if self.groups is not None:
            return self.groups[start:stop]
        return np.arange(stop - start) // self.group_size

    def _costs(self, lengths: np.ndarray) -> np.ndarray:
        if self.batching.kind == "padded":  # every sequence is as wide as the batch
            return np.ones(len(lengths), dtype=np.float32)
        length = lengths.astype(np.float32)  # exact enough for a balance, and twice as fast as fp64 for many sequences
        costs = length * np.float32(self.cost.per_pair)
        costs += np.float32(self.cost.per_token)
        costs *= length
        return costs

    def check_longest(self) -> None:
        """Check that every group fits a microbatch, so that no block fails to plan while others go on.

        Raises:
            ConfigError: A group alone exceeds `batching.tokens`.
        """
        size = self.group_size
        tokens = self.lengths[: len(self.lengths) // size * size]
        if size > 1:
            tokens = tokens.reshape(-1, size)
            tokens = tokens[(tokens.max(1) if self.batching.kind == "dynamic" else tokens.sum(1)).argmax()]
        else:
            tokens = tokens[tokens.argmax() :][:1]
        plan_lengths(tokens.tolist(), self.width, self.batching, self.layout, 1, size, self.cost)


def rank_shapes(
    planned: LengthPlan, numbers: Sequence[int], lengths: Sequence[int], layout: SequenceLayout
) -> list[Shapes]:
    """Return the microbatches of each rank, with `PADDING` in place of padding sequences.

    Args:
        planned: The plan.
        numbers: The number of each planned sequence in the global batch.
        lengths: Its tokens.
        layout: The layout.
    """
    named = [*numbers, *[PADDING] * (len(planned.lengths) - len(numbers))]
    shapes = []
    for microbatches, widths, slots in zip(
        planned.plan.sequences, planned.plan.lengths, planned.plan.slots, strict=True
    ):
        tokens = sum(lengths[place] for place in chain.from_iterable(microbatches) if place < len(lengths))
        computed = sum(round_up(count, layout.sequence_multiple) for count in slots)
        sequences = [[named[place] for place in chosen] for chosen in microbatches]
        shapes.append(Shapes(sequences, widths, tokens, computed, max(slots)))
    return shapes


def plan_ownership(
    planner: OwnershipPlanner, sizes: Sequence[int], homes: np.ndarray, rank: int, ranks: RankReduction
) -> Ownership:
    """Return who owns which sequences. Collective if there are several blocks.

    Args:
        planner: What the ranks know of the global batch.
        sizes: The number of sequences of each optimizer step. Each step is spread evenly over the ranks.
        homes: [B] The data-parallel rank on which each sequence was produced.
        rank: This data-parallel rank.
        ranks: The data-parallel ranks.

    Raises:
        ConfigError: A group alone exceeds `batching.tokens`.
    """
    planner.check_longest()
    blocks = planner.blocks
    mine = blocks.of_rank(rank)
    members = blocks.ranks(mine)
    local = np.zeros(len(planner.lengths), dtype=np.uint8)  # the rank within the block, of this block's sequences
    block_of = np.zeros(len(planner.lengths), dtype=np.uint16)
    of_steps: list[list[Shapes]] = []
    ends = np.cumsum([0, *sizes]).tolist()
    for start, stop in pairwise(ends):
        block_of[start:stop] = planner.block_of(
            start, stop, homes, mine, lambda given: _gifts(given, members, rank, ranks)
        )
        numbers = start + np.flatnonzero(block_of[start:stop] == mine)
        local[numbers], of_ranks = planner.of_block(numbers, len(members))
        of_steps.append(of_ranks)
    if len(blocks) > 1:
        local = _of_all_blocks(local if rank == members.start else np.zeros_like(local), ranks)
    owners = block_of * np.uint16(blocks.ranks_per_block)
    owners += local
    if not planner.plans_microbatches:
        return Ownership(owners, [])
    if len(blocks) > 1:
        agreed = agreed_shapes([of_ranks[rank - members.start] for of_ranks in of_steps], planner.group_size, ranks)
    else:
        agreed = [(of_ranks[rank], _efficiency(of_ranks)) for of_ranks in of_steps]
    steps = [
        StepPlan(start, stop, planner.batching, planner.group_size, [shapes], efficiency)
        for (start, stop), (shapes, efficiency) in zip(pairwise(ends), agreed, strict=True)
    ]
    return Ownership(owners, steps)


def agreed_shapes(shapes: Sequence[Shapes], group_size: int, ranks: RankReduction) -> list[tuple[Shapes, float]]:
    """Return as many microbatches on every rank, and the efficiency over all ranks. Collective.

    Args:
        shapes: The microbatches of this rank, of several steps.
        group_size: Sequences that stay together in a microbatch.
        ranks: The data-parallel ranks.
    """
    most = ranks.max(torch.tensor([len(each.sequences) for each in shapes])).tolist()
    shapes = [each.extended(count, group_size) for each, count in zip(shapes, most, strict=True)]
    totals = ranks.sum(torch.tensor([[each.tokens, each.slots] for each in shapes])).tolist()
    return [(each, tokens / slots) for each, (tokens, slots) in zip(shapes, totals, strict=True)]


def _efficiency(shapes: Sequence[Shapes]) -> float:
    return sum(each.tokens for each in shapes) / sum(each.slots for each in shapes)


def _gifts(given: np.ndarray, members: range, rank: int, ranks: RankReduction) -> np.ndarray:
    """Return [k, 2] what all blocks give away. Each rank of a block says its part of what the block gives."""
    own = given[rank - members.start :: len(members)]
    most = int(ranks.max(torch.tensor([len(own)])).item())
    padded = torch.full((most, 2), -1, dtype=torch.int32)
    padded[: len(own)] = torch.from_numpy(own)
    found = gather_from_ranks(padded.to(ranks.device), ranks.group).flatten(0, 1).cpu().numpy()
    return found[found[:, 0] >= 0].astype(np.int64)


def _of_all_blocks(local: np.ndarray, ranks: RankReduction) -> np.ndarray:
    """Return the sum over all ranks, of which one per block has the numbers of that block's sequences."""
    found = torch.from_numpy(local).to(ranks.device)
    dist.all_reduce(found, group=ranks.group)
    return found.cpu().numpy()


def default_blocks(num_ranks: int) -> Blocks:
    """Return the blocks of so many data-parallel ranks."""
    return Blocks(num_ranks, BLOCK_RANKS)

"""Assign sequences to blocks of data-parallel ranks, so that each block can plan for itself.

The time of planning grows with the number of ranks, so ranks plan in blocks of a fixed size. One vectorised pass gives
every block about the same cost per rank, and leaves most sequences where they were produced.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK_RANKS = 8
"""The number of data-parallel ranks in a block. Smaller blocks balance worse, and larger ones take longer to plan."""

GatherMoves = Callable[[np.ndarray], np.ndarray]
"""A collective: its argument is the moves from this rank's block to others, and it returns the moves of all blocks.

Moves are [k, 2]: the number of a group, and the block to which it moves."""


@dataclass(frozen=True)
class Blocks:
    """Data-parallel ranks in blocks of neighbours. The last block may have fewer ranks."""

    num_ranks: int
    ranks_per_block: int = BLOCK_RANKS

    def __len__(self) -> int:
        return -(-self.num_ranks // self.ranks_per_block)

    def sizes(self) -> np.ndarray:
        """Return the number of ranks of each block."""
        return np.diff(np.minimum(np.arange(len(self) + 1) * self.ranks_per_block, self.num_ranks))

    def find_block(self, rank: int) -> int:
        return rank // self.ranks_per_block

    def ranks(self, block: int) -> range:
        start = block * self.ranks_per_block
        return range(start, min(start + self.ranks_per_block, self.num_ranks))


_UNEVEN = 0.5  # of an even share of the cost; `deal_to_blocks` deals all groups if a block deviates by more


def assign_blocks(costs: np.ndarray, homes: np.ndarray, blocks: Blocks, block: int, gather: GatherMoves) -> np.ndarray:
    """Return the block of each group, so that blocks have about the same cost per rank. Collective.

    A block keeps most groups that its ranks have produced, and moves a few to blocks with less cost. If blocks have
    produced very different costs, for example if rank 0 has produced everything, `deal_to_blocks` deals all groups.

    Args:
        costs: [n] The cost of each group.
        homes: [n] The rank on which each group was produced.
        blocks: The blocks.
        block: The block of this rank.
        gather: Gathers the moves from all blocks.
    """
    assigned = homes // blocks.ranks_per_block
    totals = _sum_costs(costs, assigned, len(blocks))
    shares = blocks.sizes() * (totals.sum() / blocks.num_ranks)
    if np.abs(totals - shares).max() > _UNEVEN * shares.min():
        return deal_to_blocks(costs, homes, blocks)
    debts = _compute_debts(totals - shares, block)
    groups = np.flatnonzero(assigned == block)
    moves = gather(_choose_moves(groups, costs[groups], debts))
    assigned[moves[:, 0]] = moves[:, 1]
    return assigned


def _sum_costs(costs: np.ndarray, assigned: np.ndarray, num_blocks: int) -> np.ndarray:
    """Return the cost of each block's groups. If `assigned` ascends, sums over neighbours are used: they are faster."""
    if (assigned[1:] < assigned[:-1]).any():
        return np.bincount(assigned, weights=costs, minlength=num_blocks)
    starts = np.searchsorted(assigned, np.arange(num_blocks))
    has_groups = np.diff(np.r_[starts, len(assigned)]) > 0
    totals = np.zeros(num_blocks)
    if has_groups.any():
        totals[has_groups] = np.add.reduceat(costs, starts[has_groups])
    return totals


def _compute_debts(excess: np.ndarray, block: int) -> list[tuple[int, float]]:
    """Return (other block, cost) for the moves that `block` has to make, so that no block keeps an excess.

    Excesses are laid end to end on a line, and so are deficits. A block moves cost to the deficits that overlap with
    its excess.
    """
    upper = np.cumsum(np.maximum(excess, 0.0))
    lower, deficits = upper[block] - max(excess[block], 0.0), np.cumsum(np.maximum(-excess, 0.0))
    ends = np.minimum(deficits, upper[block])
    starts = np.maximum(np.r_[0.0, deficits[:-1]], lower)
    return [(int(other), float(ends[other] - starts[other])) for other in np.flatnonzero(ends > starts)]


def _choose_moves(groups: np.ndarray, costs: np.ndarray, debts: list[tuple[int, float]]) -> np.ndarray:
    """Return moves [k, 2]: groups whose costs are nearest to the debts, and the blocks to which they move.

    The error of one debt is carried over to the next.
    """
    order = np.argsort(costs, kind="stable").tolist()
    ascending = costs[order].tolist()
    moves: list[tuple[int, int]] = []
    owed = 0.0
    for block, debt in debts:
        owed += debt
        while ascending and owed > 0:
            index = bisect_left(ascending, owed)
            if index == len(ascending) or (index and owed - ascending[index - 1] < ascending[index] - owed):
                index -= 1
            if ascending[index] >= 2 * owed:  # without this move, the debt is missed by less
                break
            owed -= ascending.pop(index)
            moves.append((int(groups[order.pop(index)]), block))
    return np.array(moves, dtype=np.int64).reshape(-1, 2)


def deal_to_blocks(costs: np.ndarray, homes: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Return the block of each group, after dealing all groups.

    Groups are dealt in rounds, the costliest first, with one group per rank. So each round gives a block as many groups
    of similar cost as it has ranks. Within a round, a group stays in its block, unless that block has too many groups.
    The remaining groups go to blocks that have too few.

    Args:
        costs: [n] The cost of each group.
        homes: [n] The rank on which each group was produced.
        blocks: The blocks.
    """
    number, order = len(costs), np.argsort(-costs, kind="stable")
    rounds = np.arange(number) // blocks.num_ranks
    slots = _order_slots(number, blocks)
    # A cell is a block in a round.
    home_cells = rounds * len(blocks) + homes[order] // blocks.ranks_per_block
    slot_cells = rounds * len(blocks) + slots
    num_cells = len(blocks) * (int(rounds[-1]) + 1 if number else 0)
    produced = np.bincount(home_cells, minlength=num_cells)
    staying = np.minimum(np.bincount(slot_cells, minlength=num_cells), produced)
    index, count, share = _count_equal_before(home_cells), produced[home_cells], staying[home_cells]
    stays = (index + 1) * share // count > index * share // count  # evenly spaced among those that could stay
    is_free = _count_equal_before(slot_cells) >= staying[slot_cells]
    assigned = np.empty(number, dtype=np.int64)
    assigned[order[stays]] = homes[order[stays]] // blocks.ranks_per_block
    assigned[order[~stays]] = slots[is_free]  # every round has as many free slots as groups that do not stay
    return assigned


def _order_slots(number: int, blocks: Blocks) -> np.ndarray:
    """Return the block of each slot in the order in which groups are dealt.

    In a round, each block has one slot per rank. The order of blocks alternates, so that the first block does not
    always get the costliest group.
    """
    turns = [
        [block for block in range(len(blocks)) if turn < len(blocks.ranks(block))]
        for turn in range(blocks.ranks_per_block)
    ]
    forward = [block for turn, order in enumerate(turns) for block in (order if turn % 2 == 0 else order[::-1])]
    backward = [block for turn, order in enumerate(turns) for block in (order if turn % 2 else order[::-1])]
    return np.resize(np.array(forward + backward, dtype=np.int64), number)


def _count_equal_before(keys: np.ndarray) -> np.ndarray:
    """Return, for each key, the number of equal keys before it."""
    order = np.argsort(keys, kind="stable")
    ascending = keys[order]
    starts = np.flatnonzero(np.r_[True, ascending[1:] != ascending[:-1]]) if len(keys) else np.zeros(0, dtype=np.int64)
    counts = np.empty(len(keys), dtype=np.int64)
    counts[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    return counts


def deal_to_ranks(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return a rank for each group: costliest first, each group goes to the rank with the smallest total so far."""
    ready = [(0.0, 0, rank) for rank in range(num_ranks)]
    assigned = [0] * len(costs)
    for group in sorted(range(len(costs)), key=lambda group: (-costs[group], group)):
        total, number, rank = ready[0]
        assigned[group] = rank
        heapq.heapreplace(ready, (total + costs[group], number + 1, rank))
    return assigned

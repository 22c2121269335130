"""Deal sequences out to blocks of data-parallel ranks, so that each block can plan for itself.

A plan for all ranks takes time that grows with their number. A block has a fixed number of ranks. One vectorised pass
gives every block sequences of about the same cost, and leaves most of them where they were produced.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

BLOCK_RANKS = 8
"""The data-parallel ranks that plan together. Fewer balance worse, and more take longer to plan."""

Gifts = Callable[[np.ndarray], np.ndarray]
"""Returns what all blocks give away from what this rank's block gives away. Collective."""


@dataclass(frozen=True)
class Blocks:
    """Data-parallel ranks in blocks of neighbours. The last block may have fewer.

    Attributes:
        num_ranks: The number of data-parallel ranks.
        ranks_per_block: The ranks of a block.
    """

    num_ranks: int
    ranks_per_block: int = BLOCK_RANKS

    def __len__(self) -> int:
        """Return the number of blocks."""
        return -(-self.num_ranks // self.ranks_per_block)

    def sizes(self) -> np.ndarray:
        """Return the number of ranks of each block."""
        return np.diff(np.minimum(np.arange(len(self) + 1) * self.ranks_per_block, self.num_ranks))

    def of_rank(self, rank: int) -> int:
        """Return the block of a rank."""
        return rank // self.ranks_per_block

    def ranks(self, block: int) -> range:
        """Return the ranks of a block."""
        start = block * self.ranks_per_block
        return range(start, min(start + self.ranks_per_block, self.num_ranks))


_UNEVEN = 0.5  # of a block's share: if a block has produced so much more or less, sequences are dealt anew


def blocks_of(costs: np.ndarray, homes: np.ndarray, blocks: Blocks, mine: int, exchange: Gifts) -> np.ndarray:
    """Return the block of each group, so that blocks have about the same cost per rank. Collective.

    A block keeps what its ranks have produced, and gives a few groups to blocks that have less. If ranks have produced
    very different amounts, as when rank 0 has produced everything, all groups are dealt anew.

    Args:
        costs: [n] The cost of each group.
        homes: [n] The rank on which each group was produced.
        blocks: The blocks.
        mine: The block of this rank.
        exchange: Returns what all blocks give away, [k, 2] (the number of the group, the block that gets it), from what
            this rank's block gives away.
    """
    at = homes // blocks.ranks_per_block
    totals = _totals(costs, at, len(blocks))
    shares = blocks.sizes() * (totals.sum() / blocks.num_ranks)
    if np.abs(totals - shares).max() > _UNEVEN * shares.min():
        return deal_to_blocks(costs, homes, blocks)
    found = at.copy()
    for_others = _owed(totals - shares, mine)
    own = np.flatnonzero(at == mine)
    gifts = exchange(_chosen(own, costs[own], for_others))
    found[gifts[:, 0]] = gifts[:, 1]
    return found


def _totals(costs: np.ndarray, at: np.ndarray, number: int) -> np.ndarray:
    """Return the cost of each block's groups. A sum over neighbours is much faster than one over places."""
    if (at[1:] < at[:-1]).any():
        return np.bincount(at, weights=costs, minlength=number)
    starts = np.searchsorted(at, np.arange(number))
    is_there = np.diff(np.r_[starts, len(at)]) > 0
    totals = np.zeros(number)
    if is_there.any():
        totals[is_there] = np.add.reduceat(costs, starts[is_there])
    return totals


def _owed(excess: np.ndarray, mine: int) -> list[tuple[int, float]]:
    """Return (block, cost) of what this block owes to others, so that no block has an excess any more.

    The excesses are laid end to end, and so is what blocks lack. A block owes to those that its own part overlaps.
    """
    upper = np.cumsum(np.maximum(excess, 0.0))
    lower, lacks = upper[mine] - max(excess[mine], 0.0), np.cumsum(np.maximum(-excess, 0.0))
    ends = np.minimum(lacks, upper[mine])
    starts = np.maximum(np.r_[0.0, lacks[:-1]], lower)
    return [(int(block), float(ends[block] - starts[block])) for block in np.flatnonzero(ends > starts)]


def _chosen(numbers: np.ndarray, costs: np.ndarray, owed: list[tuple[int, float]]) -> np.ndarray:
    """Return [k, 2] the groups whose costs come nearest to what is owed, with the blocks that get them.

    What a block gets too much or too little counts in what the next one gets.
    """
    order = np.argsort(costs, kind="stable").tolist()
    ascending = costs[order].tolist()
    gifts: list[tuple[int, int]] = []
    cost = 0.0
    for block, more in owed:
        cost += more
        while ascending and cost > 0:
            place = bisect_left(ascending, cost)
            if place == len(ascending) or (place and cost - ascending[place - 1] < ascending[place] - cost):
                place -= 1
            if ascending[place] >= 2 * cost:  # without it, the block is nearer to what it owes
                break
            cost -= ascending.pop(place)
            gifts.append((int(numbers[order.pop(place)]), block))
    return np.array(gifts, dtype=np.int64).reshape(-1, 2)


def deal_to_blocks(costs: np.ndarray, homes: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Return the block of each group: a sequence, or several that stay together.

    The groups are dealt in rounds, the costliest first, and a round has one group for each rank. So every block gets as
    many groups of similar cost as it has ranks. Within a round, a group goes to the block that has it already, unless
    that block has too many. Others are left over for blocks that have too few.

    Args:
        costs: [n] The cost of each group.
        homes: [n] The rank on which each group was produced.
        blocks: The blocks.
    """
    number, order = len(costs), np.argsort(-costs, kind="stable")
    rounds = np.arange(number) // blocks.num_ranks
    slots = _slots(number, blocks)
    own, of_slots = rounds * len(blocks) + homes[order] // blocks.ranks_per_block, rounds * len(blocks) + slots
    most = len(blocks) * (int(rounds[-1]) + 1 if number else 0)
    there, wanted = np.bincount(own, minlength=most), np.bincount(of_slots, minlength=most)
    place, count, share = _places(own), there[own], np.minimum(wanted, there)[own]
    stays = (place + 1) * share // count > place * share // count  # evenly spaced among those that could stay
    is_free = _places(of_slots) >= np.minimum(wanted, there)[of_slots]
    found = np.empty(number, dtype=np.int64)
    found[order[stays]] = homes[order[stays]] // blocks.ranks_per_block
    found[order[~stays]] = slots[is_free]  # as many in every round as are left over, in the same order
    return found


def _slots(number: int, blocks: Blocks) -> np.ndarray:
    """Return the block of each place in the order in which groups are dealt.

    Each block has its turn once per rank. The direction alternates, so that the first block is not always the one with
    the costliest group.
    """
    turns = [
        [block for block in range(len(blocks)) if turn < len(blocks.ranks(block))]
        for turn in range(blocks.ranks_per_block)
    ]
    forth = [block for turn, each in enumerate(turns) for block in (each if turn % 2 == 0 else each[::-1])]
    back = [block for turn, each in enumerate(turns) for block in (each if turn % 2 else each[::-1])]
    both = np.array(forth + back, dtype=np.int64)
    return np.resize(both, number)


def _places(keys: np.ndarray) -> np.ndarray:
    """Return how many equal keys stand before each key."""
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    starts = np.flatnonzero(np.r_[True, in_order[1:] != in_order[:-1]]) if len(keys) else np.zeros(0, dtype=np.int64)
    places = np.empty(len(keys), dtype=np.int64)
    places[order] = np.arange(len(keys)) - np.repeat(starts, np.diff(np.r_[starts, len(keys)]))
    return places


def deal_to_ranks(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return the rank of each group: the costliest goes first, and each to the rank whose sum is smallest so far."""
    ready = [(0.0, 0, rank) for rank in range(num_ranks)]
    found = [0] * len(costs)
    for group in sorted(range(len(costs)), key=lambda group: (-costs[group], group)):
        total, number, rank = ready[0]
        found[group] = rank
        heapq.heapreplace(ready, (total + costs[group], number + 1, rank))
    return found

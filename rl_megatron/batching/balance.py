"""Balance costs: assign groups to packs, and packs to shards.

A group is one sequence, or several that stay together. A pack is a microbatch with a limit on its tokens. A shard is
one data-parallel rank's part of the batch. Packs should have equal costs, and so should shards, which wait for each
other at the end of every optimizer step. Every function is deterministic: ties go to the lower index.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from rl_megatron.batching.packing import Packs, pack_sequences, require_fitting, split_packs

_EVEN = 1e-3  # share of the mean cost; a smaller difference is not worth another trade
_TRADES_PER_PACK = 4  # this times the number of packs is the maximum number of trades
_TRADES_PER_SHARD = 8
_PARTNERS = 4  # how many of the cheapest shards are tried for a trade with the costliest one
_NOTHING = -1  # in place of a group, if the cheap pack gives none in return


@dataclass(frozen=True)
class Groups:
    """The groups to pack.

    Attributes:
        lengths: Tokens of each group, at most `capacity`.
        costs: The cost of each group, in any unit (see `SequenceCost`).
        capacity: The maximum number of tokens in a pack.
    """

    lengths: Sequence[int]
    costs: Sequence[float]
    capacity: int

    def cost(self, pack: Sequence[int]) -> float:
        """Return the cost of a pack of these groups."""
        return sum(self.costs[group] for group in pack)

    def space(self, pack: Sequence[int]) -> int:
        """Return the tokens that a pack of these groups could still hold."""
        return self.capacity - sum(self.lengths[group] for group in pack)


def imbalance(costs: Sequence[float]) -> float:
    """Return by how much the largest cost exceeds the mean, as a share of the mean: 0 if all are equal."""
    mean = sum(costs) / len(costs) if costs else 0.0
    return max(costs) / mean - 1 if mean else 0.0


def balance_shards(groups: Groups, num_shards: int) -> list[Packs]:
    """Return the packs of each shard, the costliest first: `[shard][k]` is a pack, a list of groups.

    All shards have the same number of packs: the minimum for the total tokens or, if the groups do not fit into that
    many, the number that modified first fit decreasing needs.
    """
    require_fitting(groups.lengths, groups.capacity)
    if not groups.lengths:
        return [[] for _ in range(num_shards)]
    best: list[Packs] | None = None
    for packs in _propose_packings(groups, num_shards):
        shards = _even_shards(groups, deal(groups, packs, num_shards))
        if best is None or _unevenness(groups, shards) < _unevenness(groups, best):
            best = shards
        if _unevenness(groups, best) <= _EVEN:
            break
    assert best is not None, "there is at least one packing"
    return [[sorted(pack) for pack in sorted(shard, key=groups.cost, reverse=True)] for shard in best]


def _propose_packings(groups: Groups, num_shards: int) -> Iterator[Packs]:
    """Yield packings with the same number of packs, the most promising first.

    Packs of equal cost make shards of equal cost, unless a few sequences are so long that no pack of short ones costs
    as much. Then packs of modified first fit decreasing can be better: their costs differ enough to balance the shards.
    """
    least = max(1, -(-sum(groups.lengths) // groups.capacity))
    packs = _spread(groups, -(-least // num_shards) * num_shards)
    if packs is not None:
        yield _even_packs(groups, packs)
    full = pack_sequences(groups.lengths, groups.capacity, "modified_first_fit_decreasing")
    full = split_packs(full, groups.lengths, -(-len(full) // num_shards) * num_shards)
    if packs is None:
        packs = _spread(groups, len(full)) or full
        yield _even_packs(groups, packs)
    if len(full) == len(packs):
        yield full


def _spread(groups: Groups, num_packs: int) -> Packs | None:
    """Add each group, costliest first, to the cheapest pack with space for it, and return the packs.

    The result is None if a group fits in no pack, or if a pack stays empty.
    """
    packs: Packs = [[] for _ in range(num_packs)]
    costs, space = [0.0] * num_packs, [groups.capacity] * num_packs
    # The number of groups breaks ties: groups that cost nothing would otherwise all join one pack and leave others
    # empty.
    ready = [(0.0, 0, pack) for pack in range(num_packs)]
    blocked: list[tuple[int, int]] = []  # (-space, pack) of packs too full for the current group; later groups may fit
    numbers = range(len(groups.lengths))
    for group in sorted(numbers, key=lambda number: (-groups.costs[number], -groups.lengths[number], number)):
        length = groups.lengths[group]
        while blocked and -blocked[0][0] >= length:
            pack = heapq.heappop(blocked)[1]
            heapq.heappush(ready, (costs[pack], len(packs[pack]), pack))
        while ready and space[ready[0][2]] < length:
            pack = heapq.heappop(ready)[2]
            heapq.heappush(blocked, (-space[pack], pack))
        if not ready:
            return None
        pack = ready[0][2]
        packs[pack].append(group)
        costs[pack] += groups.costs[group]
        space[pack] -= length
        heapq.heapreplace(ready, (costs[pack], len(packs[pack]), pack))
    return packs if all(packs) else None


def _even_packs(groups: Groups, packs: Packs) -> Packs:
    """Return the packs after trades of groups that bring the packs' costs closer together.

    Each trade is between the costliest and the cheapest pack. A costliest pack without a useful trade is set aside.
    """
    packs = [list(pack) for pack in packs]
    ranked = sorted((groups.cost(pack), number) for number, pack in enumerate(packs))
    mean = sum(cost for cost, _ in ranked) / len(ranked)
    for _ in range(_TRADES_PER_PACK * len(packs)):
        if len(ranked) < 2 or ranked[-1][0] - ranked[0][0] <= _EVEN * mean:
            break
        (cheap_cost, cheap), (costly_cost, costly) = ranked[0], ranked.pop()
        error, trade = _find_best_trade(groups, packs[costly], packs[cheap], costly_cost - cheap_cost)
        if trade is None:
            continue  # the costliest pack stays as it is, and the next costliest is tried
        del ranked[0]
        _exchange(packs[costly], packs[cheap], *trade)
        for number in (costly, cheap):
            insort(ranked, (groups.cost(packs[number]), number))
    return packs


def deal(groups: Groups, packs: Packs, num_shards: int) -> list[Packs]:
    """Return the packs of each shard, `[shard][k]`, the same number for all.

    Each round deals packs of similar cost, one per shard, so that shards that run in lockstep wait little. The
    costliest pack of a round goes to the shard with the smallest total so far, so that totals are similar too.
    """
    order = sorted(packs, key=groups.cost, reverse=True)
    shards: list[Packs] = [[] for _ in range(num_shards)]
    costs = [0.0] * num_shards
    for start in range(0, len(order), num_shards):
        cheapest_first = sorted(range(num_shards), key=costs.__getitem__)
        for shard, pack in zip(cheapest_first, order[start : start + num_shards], strict=True):
            shards[shard].append(pack)
            costs[shard] += groups.cost(pack)
    return shards


def _even_shards(groups: Groups, shards: list[Packs]) -> list[Packs]:
    """Return the shards after trades, each between the costliest shard and one of the cheapest.

    A trade swaps the k-th packs of the two shards, or exchanges groups of these packs.
    """
    shards = [[list(pack) for pack in shard] for shard in shards]
    costs = [sum(map(groups.cost, shard)) for shard in shards]
    for _ in range(_TRADES_PER_SHARD * len(shards)):
        order = sorted(range(len(shards)), key=costs.__getitem__)
        costly = order[-1]
        for cheap in order[: min(_PARTNERS, len(order) - 1)]:
            gap = costs[costly] - costs[cheap]
            if gap > _EVEN * sum(costs) / len(costs) and _trade_once(groups, shards[costly], shards[cheap], gap):
                break
        else:
            break
        for shard in (costly, cheap):
            costs[shard] = sum(map(groups.cost, shards[shard]))
    return shards


def _trade_once(groups: Groups, costly: Packs, cheap: Packs, gap: float) -> bool:
    """Make the trade that most reduces the `gap` between the costs of two shards; return False if none reduces it."""
    trades: list[tuple[float, int, tuple[int, int] | None]] = []
    for index, (costly_pack, cheap_pack) in enumerate(zip(costly, cheap, strict=True)):
        trades.append((abs(groups.cost(costly_pack) - groups.cost(cheap_pack) - gap / 2), index, None))
        error, exchange = _find_best_trade(groups, costly_pack, cheap_pack, gap)
        if exchange is not None:
            trades.append((error, index, exchange))
    error, index, exchange = min(trades, key=itemgetter(0))
    if error >= gap / 2:
        return False
    if exchange is None:
        costly[index], cheap[index] = cheap[index], costly[index]
    else:
        _exchange(costly[index], cheap[index], *exchange)
    return True


def _find_best_trade(
    groups: Groups, costly: list[int], cheap: list[int], gap: float
) -> tuple[float, tuple[int, int] | None]:
    """Return (error, exchange) for the exchange whose net cost is nearest to half the `gap`; the error is the distance.

    The exchange is (group of `costly`, group of `cheap` or `_NOTHING`), or None if no exchange fits both packs and
    narrows the gap.
    """
    space_costly, space_cheap = groups.space(costly), groups.space(cheap)
    returns = sorted((groups.costs[group], group) for group in cheap)
    if len(costly) > 1:  # a pack must not become empty
        returns.insert(0, (0.0, _NOTHING))
    best_error, best = gap / 2, None
    for sent in costly:
        wanted = groups.costs[sent] - gap / 2
        index = bisect_left(returns, (wanted, _NOTHING))
        for cost, received in returns[max(index - 1, 0) : index + 1]:
            tokens = groups.lengths[sent] - (groups.lengths[received] if received != _NOTHING else 0)
            if abs(cost - wanted) < best_error and -space_costly <= tokens <= space_cheap:
                best_error, best = abs(cost - wanted), (sent, received)
    return best_error, best


def _exchange(costly: list[int], cheap: list[int], sent: int, received: int) -> None:
    costly.remove(sent)
    cheap.append(sent)
    if received != _NOTHING:
        cheap.remove(received)
        costly.append(received)


def _unevenness(groups: Groups, shards: list[Packs]) -> float:
    return imbalance([sum(map(groups.cost, shard)) for shard in shards])

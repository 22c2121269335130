"""Work spread evenly: units over packs, and packs over shards.

A unit is a sequence, or several that stay together. A pack has room for so many tokens. The packs' costs should be
equal, and so should the sums of the shards, which wait for each other at the end of every optimizer step. Every
function is deterministic: ties go to what comes first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl_megatron.batching.packing import Packs, pack_sequences, require_fitting, split_packs

_EVEN = 1e-3  # of the mean cost: closer than this, packs and shards are not worth another trade
_TRADES_PER_PACK = 4  # on average, at most
_TRADES_PER_SHARD = 8
_PARTNERS = 4  # the cheapest shards, which the costliest one asks for a trade
_NOTHING = -1  # in place of a unit: given away for nothing in return


@dataclass(frozen=True)
class Units:
    """What is to be packed.

    Attributes:
        lengths: tokens of each unit, at most `capacity`.
        costs: of each unit, in any measure (see `SequenceCost`).
        capacity: tokens a pack holds.
    """

    lengths: Sequence[int]
    costs: Sequence[float]
    capacity: int

    def cost(self, pack: Sequence[int]) -> float:
        return sum(self.costs[unit] for unit in pack)

    def room(self, pack: Sequence[int]) -> int:
        return self.capacity - sum(self.lengths[unit] for unit in pack)


def imbalance(costs: Sequence[float]) -> float:
    """By how much the largest exceeds the mean, as a share of the mean: 0 where all are equal."""
    mean = sum(costs) / len(costs) if costs else 0.0
    return max(costs) / mean - 1 if mean else 0.0


def balanced_shards(units: Units, num_shards: int) -> list[Packs]:
    """Units over packs over shards: `[shard][k]` is a pack, a list of units. A shard's costliest pack comes first.

    There are as few packs as the tokens allow, and equally many on every shard; where the units cannot be placed in so
    few, as many as modified first fit decreasing needs.

    Raises:
        ValueError: a unit longer than a pack, or fewer units than packs are needed.
    """
    require_fitting(units.lengths, units.capacity)
    best: list[Packs] | None = None
    for packs in _packings(units, num_shards):
        shards = _even_shards(units, deal(units, packs, num_shards))
        if best is None or _unevenness(units, shards) < _unevenness(units, best):
            best = shards
        if _unevenness(units, best) <= _EVEN:
            break
    assert best is not None, "the last packing is always there"
    return [[sorted(pack) for pack in sorted(shard, key=units.cost, reverse=True)] for shard in best]


def _packings(units: Units, num_shards: int) -> Iterator[Packs]:
    """Packings with the same number of packs, the most promising first.

    Equal packs make equal shards, unless a few sequences are so long that no pack of short ones can cost as much.
    Then packs that are merely full can be the better start: they differ enough to make up for each other.
    """
    least = max(1, -(-sum(units.lengths) // units.capacity))
    packs = _spread(units, -(-least // num_shards) * num_shards)
    if packs is not None:
        yield _even_packs(units, packs)
    full = pack_sequences(units.lengths, units.capacity, "modified_first_fit_decreasing")
    full = split_packs(full, units.lengths, -(-len(full) // num_shards) * num_shards)
    if packs is None:
        packs = _spread(units, len(full)) or full
        yield _even_packs(units, packs)
    if len(full) == len(packs):
        yield full


def _spread(units: Units, num_packs: int) -> Packs | None:
    """The costliest unit first, each into the cheapest pack with room for it. No pack is empty.

    Returns None where a unit finds no room, or where there are fewer units than packs.
    """
    packs: Packs = [[] for _ in range(num_packs)]
    costs, room = [0.0] * num_packs, [units.capacity] * num_packs
    # The number of units breaks ties: units that cost nothing would otherwise all join one pack and leave others empty.
    ready = [(0.0, 0, pack) for pack in range(num_packs)]
    blocked: list[tuple[int, int]] = []  # (-room, pack): too full for the unit at hand, not for every later one
    for unit in sorted(range(len(units.lengths)), key=lambda unit: (-units.costs[unit], -units.lengths[unit], unit)):
        length = units.lengths[unit]
        while blocked and -blocked[0][0] >= length:
            pack = heapq.heappop(blocked)[1]
            heapq.heappush(ready, (costs[pack], len(packs[pack]), pack))
        while ready and room[ready[0][2]] < length:
            pack = heapq.heappop(ready)[2]
            heapq.heappush(blocked, (-room[pack], pack))
        if not ready:
            return None
        pack = ready[0][2]
        packs[pack].append(unit)
        costs[pack] += units.costs[unit]
        room[pack] -= length
        heapq.heapreplace(ready, (costs[pack], len(packs[pack]), pack))
    return packs if all(packs) else None


def _even_packs(units: Units, packs: Packs) -> Packs:
    """The same packs after trades, each between the costliest pack and the cheapest."""
    packs = [list(pack) for pack in packs]
    ranked = sorted((units.cost(pack), number) for number, pack in enumerate(packs))
    mean = sum(cost for cost, _ in ranked) / len(ranked)
    for _ in range(_TRADES_PER_PACK * len(packs)):
        if len(ranked) < 2 or ranked[-1][0] - ranked[0][0] <= _EVEN * mean:
            break
        (cheap_cost, cheap), (costly_cost, costly) = ranked[0], ranked.pop()
        error, trade = _best_trade(units, packs[costly], packs[cheap], costly_cost - cheap_cost)
        if trade is None:
            continue  # the costliest pack stays as it is, and the next one has its turn
        del ranked[0]
        _exchange(packs[costly], packs[cheap], *trade)
        for number in (costly, cheap):
            insort(ranked, (units.cost(packs[number]), number))
    return packs


def deal(units: Units, packs: Packs, num_shards: int) -> list[Packs]:
    """Packs over shards, as many for each: `[shard][k]`.

    The k-th packs of all shards are neighbours in order of cost, so that shards which work in lockstep wait little. Of
    these the costliest goes to the shard with the least so far, so that the sums are alike too.
    """
    order = sorted(packs, key=units.cost, reverse=True)
    shards: list[Packs] = [[] for _ in range(num_shards)]
    costs = [0.0] * num_shards
    for start in range(0, len(order), num_shards):
        cheapest_first = sorted(range(num_shards), key=costs.__getitem__)
        for shard, pack in zip(cheapest_first, order[start : start + num_shards], strict=True):
            shards[shard].append(pack)
            costs[shard] += units.cost(pack)
    return shards


def _even_shards(units: Units, shards: list[Packs]) -> list[Packs]:
    """The same shards after trades of the costliest one with one of the cheapest: their k-th packs change places, or
    exchange units."""
    shards = [[list(pack) for pack in shard] for shard in shards]
    costs = [sum(map(units.cost, shard)) for shard in shards]
    for _ in range(_TRADES_PER_SHARD * len(shards)):
        order = sorted(range(len(shards)), key=costs.__getitem__)
        costly = order[-1]
        for cheap in order[: min(_PARTNERS, len(order) - 1)]:
            gap = costs[costly] - costs[cheap]
            if gap > _EVEN * sum(costs) / len(costs) and _trade_once(units, shards[costly], shards[cheap], gap):
                break
        else:
            break
        for shard in (costly, cheap):
            costs[shard] = sum(map(units.cost, shards[shard]))
    return shards


def _trade_once(units: Units, costly: Packs, cheap: Packs, gap: float) -> bool:
    """The trade that brings two shards, `gap` apart, nearest to each other; False where none does."""
    best_error, best_place, best_trade = gap / 2, None, None
    for place, (ours, theirs) in enumerate(zip(costly, cheap, strict=True)):
        error = abs(units.cost(ours) - units.cost(theirs) - gap / 2)
        if error < best_error:
            best_error, best_place, best_trade = error, place, None
        error, trade = _best_trade(units, ours, theirs, gap)
        if trade is not None and error < best_error:
            best_error, best_place, best_trade = error, place, trade
    if best_place is None:
        return False
    if best_trade is None:
        costly[best_place], cheap[best_place] = cheap[best_place], costly[best_place]
    else:
        _exchange(costly[best_place], cheap[best_place], *best_trade)
    return True


def _best_trade(units: Units, costly: list[int], cheap: list[int], gap: float) -> tuple[float, tuple[int, int] | None]:
    """How far from half the `gap` the best exchange moves, and that exchange: (unit of `costly`, unit of `cheap` or
    `_NOTHING`), where one fits both packs and narrows the gap."""
    room_costly, room_cheap = units.room(costly), units.room(cheap)
    wares = sorted((units.costs[unit], unit) for unit in cheap)
    if len(costly) > 1:  # a pack of one must not give it away for nothing
        wares.insert(0, (0.0, _NOTHING))
    best_error, best = gap / 2, None
    for given in costly:
        wanted = units.costs[given] - gap / 2
        place = bisect_left(wares, (wanted, _NOTHING))
        for cost, taken in wares[max(place - 1, 0) : place + 1]:
            moved = units.lengths[given] - (units.lengths[taken] if taken != _NOTHING else 0)
            if abs(cost - wanted) < best_error and -room_costly <= moved <= room_cheap:
                best_error, best = abs(cost - wanted), (given, taken)
    return best_error, best


def _exchange(costly: list[int], cheap: list[int], given: int, taken: int) -> None:
    costly.remove(given)
    cheap.append(given)
    if taken != _NOTHING:
        cheap.remove(taken)
        costly.append(taken)


def _unevenness(units: Units, shards: list[Packs]) -> float:
    return imbalance([sum(map(units.cost, shard)) for shard in shards])

"""Bin packing of sequences: which sequences share one pack of at most `capacity` tokens.

Each algorithm is a deterministic function from lengths to packs; `ALGORITHMS` names them. Ties go to the sequence that
comes first.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence

from rl_megatron.config.errors import unknown_name

Packs = list[list[int]]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pack_sequences(
    lengths: Sequence[int], capacity: int, algorithm: str = "modified_first_fit_decreasing"
) -> list[list[int]]:
    """Split the sequences over packs so that the lengths of each pack add up to at most `capacity`.

    Args:
        lengths: The padded length of each sequence inside a pack.
        capacity: The maximum number of tokens in a pack.
        algorithm: A key of `ALGORITHMS`.

    Returns:
        Packs of indices into `lengths`. Every index is in one pack; a pack's indices ascend, and no pack is empty.

    Raises:
        ValueError: The algorithm is unknown, a length is negative, or a sequence is longer than `capacity`.
    """
    if algorithm not in ALGORITHMS:
        raise unknown_name("packing algorithm", algorithm, ALGORITHMS)
    require_fitting(lengths, capacity)
    return [sorted(pack) for pack in ALGORITHMS[algorithm](lengths, capacity)]


def require_fitting(lengths: Sequence[int], capacity: int) -> None:
    """Raise ValueError unless `capacity` is at least 1 and all lengths are from 0 to `capacity`."""
    if not capacity >= 1:
        raise ValueError(f"a pack holds {capacity} tokens: its capacity must be at least 1.")
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"sequence {index} has length {length}: lengths must not be negative.")
        if length > capacity:
            raise ValueError(
                f"sequence {index} has {length} tokens, but a pack holds {capacity}: raise max_tokens_per_microbatch "
                f"to at least {max(lengths)} or shorten the sequences."
            )


def split_packs(packs: Packs, lengths: Sequence[int], num_packs: int) -> Packs:
    """Split the pack with the most tokens in two, again and again, until there are `num_packs` packs."""
    num_sequences = sum(map(len, packs))
    if num_sequences < num_packs:
        raise ValueError(
            f"{num_sequences} sequences cannot fill {num_packs} packs: append padding sequences with "
            f"`BatchedDataDict.pad_to_multiple`, or shard over fewer ranks."
        )

    def heaviest_first(pack: list[int]) -> tuple[bool, int, list[int]]:
        return len(pack) == 1, -sum(lengths[index] for index in pack), pack  # a pack of one cannot be split

    heap = [heaviest_first(pack) for pack in packs]
    heapq.heapify(heap)
    while len(heap) < num_packs:
        for half in _halve(heapq.heappop(heap)[2], lengths):
            heapq.heappush(heap, heaviest_first(half))
    return sorted(pack for _, _, pack in heap)


def _halve(pack: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return two packs of similar size: each sequence, longest first, joins the pack with fewer tokens."""
    first: list[int] = []
    second: list[int] = []
    weights = [0, 0]
    for index in _sort_longest_first(pack, lengths):
        lighter_is_second = bool(first) and (not second or weights[1] < weights[0])
        (second if lighter_is_second else first).append(index)
        weights[lighter_is_second] += lengths[index]
    return sorted(first), sorted(second)


def _sort_longest_first(indices: Sequence[int], lengths: Sequence[int]) -> list[int]:
    return sorted(indices, key=lambda index: (-lengths[index], index))


def _first_fit(indices: Sequence[int], lengths: Sequence[int], capacity: int) -> Packs:
    """Add each sequence, in the order of `indices`, to the first pack with space for it, and return the packs."""
    packs: Packs = [[] for _ in indices]
    # A tournament tree: leaf `first_leaf + pack` is the pack's space, and every node n above the leaves is the larger
    # of its children 2n and 2n + 1.
    first_leaf = 1 << max(len(packs) - 1, 0).bit_length()
    space = [capacity] * (2 * first_leaf)
    for index in indices:
        node = 1
        while node < first_leaf:
            node = 2 * node + (space[2 * node] < lengths[index])
        packs[node - first_leaf].append(index)
        space[node] -= lengths[index]
        while node > 1:
            node //= 2
            space[node] = max(space[2 * node], space[2 * node + 1])
    return [pack for pack in packs if pack]


def concatenative(lengths: Sequence[int], capacity: int) -> Packs:
    """Return packs of consecutive sequences; a new pack starts if the next sequence does not fit."""
    packs: Packs = []
    space = -1
    for index, length in enumerate(lengths):
        if length > space:
            packs.append([])
            space = capacity
        packs[-1].append(index)
        space -= length
    return packs


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Packs:
    """Add each sequence, longest first, to the first pack with space for it, and return the packs.

    The number of packs is at most 11/9 of the minimum, plus one.
    """
    return _first_fit(_sort_longest_first(range(len(lengths)), lengths), lengths, capacity)


def modified_first_fit_decreasing(lengths: Sequence[int], capacity: int) -> Packs:
    """Pack as first fit decreasing does, but first fill the packs that have a long sequence, and return the packs.

    The number of packs is at most 71/60 of the minimum, plus one.

    Sequences are long (> 1/2 of the capacity), medium (> 1/3), small (> 1/6) or tiny. Every long one opens a pack.
      1. To each pack, from the fullest to the emptiest, add the longest medium sequence that fits.
      2. To each pack without a medium sequence, from the emptiest to the fullest, if the two shortest small sequences
         fit, add the shortest one and then the longest small one that fits.
      3. To each pack, from the fullest to the emptiest, add the longest remaining sequence that fits, until none does.
      4. Pack the rest by first fit decreasing.

    Source: Johnson and Garey, "A 71/60 theorem for bin packing", Journal of Complexity 1 (1985).
    """
    order = _sort_longest_first(range(len(lengths)), lengths)
    long = [index for index in order if 2 * lengths[index] > capacity]
    medium = [index for index in order if 2 * lengths[index] <= capacity < 3 * lengths[index]]
    small = [index for index in order if 3 * lengths[index] <= capacity < 6 * lengths[index]]
    tiny = [index for index in order if 6 * lengths[index] <= capacity]
    packs = [[index] for index in long]
    space = [capacity - lengths[index] for index in long]

    def add(pack: int, index: int) -> None:
        packs[pack].append(index)
        space[pack] -= lengths[index]

    def add_longest_that_fits(pack: int, source: list[int]) -> bool:
        longest = bisect_left(source, -space[pack], key=lambda index: -lengths[index])
        if longest < len(source):
            add(pack, source.pop(longest))
            return True
        return False

    for pack in range(len(packs)):
        add_longest_that_fits(pack, medium)
    for pack in reversed(range(len(packs))):
        if len(packs[pack]) == 1 and len(small) >= 2 and lengths[small[-1]] + lengths[small[-2]] <= space[pack]:
            add(pack, small.pop())
            add_longest_that_fits(pack, small)
    rest = _sort_longest_first(medium + small + tiny, lengths)
    for pack in range(len(packs)):
        while add_longest_that_fits(pack, rest):
            pass
    return packs + _first_fit(rest, lengths, capacity)


ALGORITHMS: dict[str, Callable[[Sequence[int], int], Packs]] = {
    "concatenative": concatenative,
    "first_fit_decreasing": first_fit_decreasing,
    "modified_first_fit_decreasing": modified_first_fit_decreasing,
}

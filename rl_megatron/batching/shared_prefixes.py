"""The tokens that sequences of a batch have in common, found once where the sequences are produced.

Sequences that may share their beginnings form a set. In a set, sequences are put in the order of their tokens, as words
in a dictionary. Then a sequence has more in common with its neighbour than with any sequence after that, and any two
have in common the least that neighbours between them have. So two numbers per sequence describe all of it: its
neighbour, and how many tokens it shares with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.batching.routing import ROUTED_EXPERTS

PREFIX_SET = "prefix_set"
"""The key of a batch with a number for each sequence. Sequences with the same number may share their beginnings."""

NEIGHBOUR, SHARED = "prefix_neighbour", "prefix_tokens"
"""Facts of each sequence: the number of the sequence before it in its set, minus its own number, or 0 if it is the
first; and the number of tokens that the two share.
"""

PREFIX_FACTS = (NEIGHBOUR, SHARED)

MOST_LEVELS = 64
"""The most segments of a sequence. Each level of a tree costs some calls of kernels."""


def find_shared_prefixes(batch: Mapping[str, Any], lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return `NEIGHBOUR` and `SHARED` [n] int32 of sequences with the key `PREFIX_SET`.

    The last token that two sequences have in common is not shared, because different tokens follow it. So each shared
    token has one next token. A set whose tree would have more than `MOST_LEVELS` levels is divided.

    Raises:
        ValueError: `PREFIX_SET` is not one whole number for each sequence.
    """
    ids, sets = batch["input_ids"].numpy(), _read_sets(batch[PREFIX_SET], len(lengths))
    lengths = [max(length, 1) for length in lengths]
    experts = batch[ROUTED_EXPERTS].numpy() if ROUTED_EXPERTS in batch else None
    temperatures = _expand_temperature(batch).numpy()
    neighbours, shared = np.zeros((2, len(sets)), dtype=np.int32)
    members: dict[int, list[int]] = {}
    for sequence, number in enumerate(sets):
        members.setdefault(number, []).append(sequence)
    for sequences in members.values():
        if len(sequences) == 1:
            continue
        words = {sequence: ids[sequence, : lengths[sequence]].astype(">u4").tobytes() for sequence in sequences}
        sequences.sort(key=words.__getitem__)
        counts = [0]
        for previous, sequence in pairwise(sequences):
            common = min(lengths[previous], lengths[sequence])
            common = _count_equal(ids[previous, :common], ids[sequence, :common]) - 1
            if common > 0:
                read = slice(1, common + 1)  # a token's logits are read at the temperature of the next token
                common = _count_equal(temperatures[previous, read], temperatures[sequence, read])
            if common > 0 and experts is not None:
                common = _count_equal(experts[previous, :common], experts[sequence, :common])
            counts.append(max(common, 0))
        _limit_levels(counts, [lengths[sequence] for sequence in sequences], 0, len(sequences))
        for previous, sequence, common in zip(sequences, sequences[1:], counts[1:], strict=False):
            if common:
                neighbours[sequence], shared[sequence] = previous - sequence, common
    return {NEIGHBOUR: torch.from_numpy(neighbours), SHARED: torch.from_numpy(shared)}


def _read_sets(sets: object, count: int) -> list[int]:
    if not isinstance(sets, Tensor) or sets.is_floating_point() or sets.shape != (count,):
        shown = f"{sets.dtype} {tuple(sets.shape)}" if isinstance(sets, Tensor) else type(sets).__name__
        raise ValueError(
            f"{PREFIX_SET} must be a tensor of integers, one for each of the {count} sequences, got {shown}; sequences "
            "with the same number may share their beginnings"
        )
    return sets.tolist()


def _limit_levels(shared: list[int], lengths: Sequence[int], start: int, stop: int) -> None:
    """Set an entry of `shared` from `start` to `stop` to 0 wherever a tree of these sequences would be too deep."""
    if stop - start > MOST_LEVELS:  # a sequence has at most as many segments as the tree has sequences
        tree = PrefixTree.build(lengths[start:stop], [0, *shared[start + 1 : stop]])
        if tree.depth > MOST_LEVELS:
            middle = (start + stop) // 2
            shared[middle] = 0
            _limit_levels(shared, lengths, start, middle)
            _limit_levels(shared, lengths, middle, stop)


def _expand_temperature(batch: Mapping[str, Any]) -> Tensor:
    """Return the temperature of each token, [n, S]."""
    temperature = torch.as_tensor(batch.get("temperature", 1.0))
    return (temperature[:, None] if temperature.dim() == 1 else temperature).expand(batch["input_ids"].shape)


def _count_equal(one: np.ndarray, other: np.ndarray) -> int:
    """Return the number of entries before the first one that differs."""
    differs = (one != other).reshape(len(one), -1).any(axis=1)
    return int(differs.argmax()) if differs.any() else len(one)


class SharedPrefixes:
    """The sets of a batch's sequences, in order. A set ends if a sequence shares nothing with the next one."""

    def __init__(self, facts: Mapping[str, Tensor]):
        """Read the facts `NEIGHBOUR` and `SHARED`."""
        offsets, self.shared = facts[NEIGHBOUR].numpy(), facts[SHARED].numpy()
        numbers = np.arange(len(offsets))
        self._before = np.where(offsets != 0, numbers + offsets, -1)
        after = np.full(len(offsets), -1)
        has_neighbour = self._before >= 0
        after[self._before[has_neighbour]] = numbers[has_neighbour]
        self.chain = np.full(len(offsets), -1)  # the first sequence of each one's set
        self.position = np.zeros(len(offsets), dtype=np.int64)  # its position in the set
        current, position = numbers[~has_neighbour], 0
        first = current
        while len(current):
            self.chain[current], self.position[current] = first, position
            following = after[current]
            current, first, position = following[following >= 0], first[following >= 0], position + 1

    def grow(self, numbers: Sequence[int], lengths: Sequence[int]) -> PrefixTree:
        """Return the tree of some sequences; each sequence of a negative number has tokens of its own only.

        Args:
            numbers: Their numbers.
            lengths: Their numbers of tokens. The paths of the tree are in the same order.
        """
        order, shared = self.arrange(numbers)
        tree = PrefixTree.build([lengths[index] for index in order], shared)
        paths = dict(zip(order, tree.paths, strict=True))
        return replace(tree, paths=tuple(paths[index] for index in range(len(numbers))))

    def arrange(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return (order, shared) for `PrefixTree.build`.

        `order` has the indices of `numbers`, so that the sequences of a set follow each other in its order. `shared`
        has the number of tokens that each of these shares with the one before it. A negative number shares none.
        """

        def find_place(index: int) -> tuple[int, int]:
            number = numbers[index]
            if number < 0:
                return len(numbers), index
            return first_of_set[self._set(number)], int(self.position[number])

        first_of_set: dict[int, int] = {}
        for index, number in enumerate(numbers):
            first_of_set.setdefault(self._set(number), index)
        order = sorted(range(len(numbers)), key=find_place)
        pairs = pairwise(numbers[index] for index in order)
        return order, [0, *(self._count_shared(previous, number) for previous, number in pairs)]

    def _set(self, number: int) -> int:
        return int(self.chain[number]) if number >= 0 else -1

    def _count_shared(self, previous: int, number: int) -> int:
        if min(previous, number) < 0 or self.chain[previous] != self.chain[number]:
            return 0
        least = int(self.shared[number])
        while (number := int(self._before[number])) != previous:
            least = min(least, int(self.shared[number]))
        return least

    def round_down(self, multiple: int) -> SharedPrefixes:
        """Return the same with numbers of shared tokens that are multiples of `multiple`.

        Then no segment but the last one of a sequence needs padding to this multiple.
        """
        shared = self.shared // multiple * multiple
        numbers = np.arange(len(shared))
        neighbours = np.where((self._before >= 0) & (shared > 0), self._before - numbers, 0)
        return SharedPrefixes({NEIGHBOUR: torch.from_numpy(neighbours), SHARED: torch.from_numpy(shared)})

    def take(self, numbers: np.ndarray) -> SharedPrefixes:
        """Return what some sequences, given in ascending order, have in common; they are numbered from 0."""
        chosen = np.zeros(len(self.shared), dtype=bool)
        chosen[numbers] = True
        return SharedPrefixes(self.select(chosen))

    def select(self, chosen: np.ndarray) -> dict[str, Tensor]:
        """Return the facts of the chosen sequences alone; `chosen` is [B] bool."""
        numbers = np.flatnonzero(chosen)
        renumbered = np.cumsum(chosen) - 1
        neighbours, shared = np.zeros((2, len(numbers)), dtype=np.int32)
        order = numbers[np.lexsort((self.position[numbers], self.chain[numbers]))]
        for previous, number in zip(order, order[1:], strict=False):
            common = self._count_shared(int(previous), int(number))
            if common:
                neighbours[renumbered[number]] = renumbered[previous] - renumbered[number]
                shared[renumbered[number]] = common
        return {NEIGHBOUR: torch.from_numpy(neighbours), SHARED: torch.from_numpy(shared)}

"""The shape of a microbatch, and its counts of attention's (query, key) pairs and of the gated delta rule's operations.

All counts are computed by formulas, without loops over tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self

from rl_megatron.batching.microbatch import padded_lengths
from rl_megatron.batching.packing import round_up
from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape
from rl_megatron.model.layers.delta_rule import BLOCK
from rl_megatron.model.layers.packed_tree import group_by_depth, list_ancestors_in_window
from rl_megatron.topology.degrees import SequenceLayout


class DeltaFlops(NamedTuple):
    """The numbers of operations of the gated delta rule.

    `needed` is the number for a forward pass without blocks, which handles one token after the other.
    """

    forward: int
    backward: int
    needed: int

    def times(self, layers: int) -> DeltaFlops:
        return DeltaFlops(*(layers * operations for operations in self))


NO_DELTA = DeltaFlops(0, 0, 0)


def count_delta_flops(
    shape: DeltaShape, length: int, *, has_earlier: bool = False, has_later: bool = False
) -> DeltaFlops:
    """Return the operations of the blockwise gated delta rule (`model/layers/delta_rule.py`) on a sequence.

    With `has_earlier`, it starts from the memory of earlier tokens, and with `has_later`, later tokens start from its
    own. Then these memories have gradients.
    """
    block = min(BLOCK, length)
    blocks, key, value = -(-length // block), shape.key, shape.value
    scores = 4 * block**2 * key + shape.values * 2 * block**2 * value  # keys·keys and queries·keys; then scores·values
    solve = shape.values * block**2 * (key + value)
    with_memory = shape.values * 2 * block * key * value  # of each of three products: correct, write, read
    # Without earlier or later tokens, the backward pass needs no gradient of the first memory or of the last write.
    of_first = 0 if has_earlier else 1 if blocks > 1 else 2
    backward = (6 * blocks - of_first - (0 if has_later else 2)) * with_memory
    return DeltaFlops(
        shape.groups * blocks * (scores + solve + 3 * with_memory),
        shape.groups * (blocks * (2 * scores + 3 * solve) + backward),
        shape.groups * length * shape.values * 6 * key * value,
    )


@dataclass(frozen=True)
class MicrobatchShape:
    """The sequences of one microbatch, over all ranks that share it.

    Attributes:
        lengths: The length of each sequence.
        padded_lengths: The length of each sequence, padding included.
        width: The number of columns of the batch, at least the length of the longest sequence.
        prompt_tokens: The number of tokens without loss at the beginning of each sequence.
        is_packed: Whether the sequences are one after the other. Otherwise they are side by side, and all padded to
            the width.
        tree: If sequences share tokens, the tree whose segments `lengths` and `padded_lengths` refer to.
        by_flash: Whether the flash kernel computes a tree's attention without a window. It forms no batches.
    """

    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    width: int
    prompt_tokens: int
    is_packed: bool
    tree: PrefixTree | None = None
    by_flash: bool = False

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        layout: SequenceLayout,
        *,
        is_packed: bool,
        width: int | None = None,
        prompt_tokens: int = 0,
    ) -> Self:
        """Return the shape of a microbatch of sequences with these lengths in a layout."""
        width = width or max(lengths)
        if is_packed:
            padded = padded_lengths(lengths, layout)
        else:
            padded = [round_up(width, layout.sequence_multiple)] * len(lengths)
        return cls(tuple(lengths), tuple(padded), width, prompt_tokens, is_packed)

    @classmethod
    def from_tree(
        cls, tree: PrefixTree, layout: SequenceLayout, width: int, prompt_tokens: int = 0, *, by_flash: bool = False
    ) -> Self:
        """Return the shape of a pack of sequences that share tokens, in a layout."""
        lengths = [segment.length for segment in tree.segments]
        return cls(tuple(lengths), tuple(padded_lengths(lengths, layout)), width, prompt_tokens, True, tree, by_flash)

    @property
    def tokens(self) -> int:
        """Return the number of tokens, padding included."""
        return sum(self.padded_lengths)

    def pairs(self, context: int, window: int | None, context_rank: int = 0) -> int:
        """Return how many (query, key) pairs attention computes on one rank, padding included.

        Sequences of a pack whose lengths have equally many binary digits are computed as one batch, padded to the
        longest. A context-parallel rank has two slices of each sequence. If no mask is needed (no window and equal
        lengths), each slice attends only to the keys up to its end.

        Args:
            context: The context-parallel degree.
            window: The number of tokens that a token attends to, or None for no window.
            context_rank: The context-parallel rank. With a window and shared tokens, the number depends on it.
        """
        total, slices = self._count_ancestor_pairs(context, window, context_rank), 2 * context
        if self.by_flash and self._is_within(window):
            return total + sum(
                length**2 if context == 1 else (length // slices) ** 2 * (slices + 1) for length in self.padded_lengths
            )
        for lengths, longest, has_mask in self._group_attending(window, context):
            if context == 1 or has_mask:
                total += len(lengths) * longest**2 // context
            else:
                total += len(lengths) * (longest // slices) ** 2 * (slices + 1)
        return total

    def computed_pairs(self, context: int, window: int | None) -> float:
        """Return the number of `pairs` that kernels compute: all if there is a mask, otherwise only causal ones."""
        if self.by_flash and self._is_within(window):
            return self.needed_pairs(context, window)
        return self._count_ancestor_pairs(context, window, 0) + sum(
            len(lengths) * (longest**2 if has_mask else count_causal_pairs(longest, window)) / context
            for lengths, longest, has_mask in self._group_attending(window, context)
        )

    def needed_pairs(self, context: int, window: int | None) -> float:
        """Return the number of pairs whose scores change the result, as a mean over context-parallel ranks."""
        begins = [0] * len(self.lengths) if self.tree is None else [segment.begin for segment in self.tree.segments]
        return sum(
            count_causal_pairs(begin + length, window) - count_causal_pairs(begin, window)
            for begin, length in zip(begins, self.padded_lengths, strict=True)
        ) / context  # fmt: skip

    def _count_ancestor_pairs(self, context: int, window: int | None, context_rank: int) -> int:
        """Return the number of `pairs` with keys of ancestors in the tree; 0 without a tree."""
        if self.tree is None:
            return 0
        boundaries = [0, *accumulate(self.padded_lengths)]
        if window is None or self._is_within(window):
            return sum(
                (boundaries[segment.end] - boundaries[index + 1]) // context * segment.length
                for index, segment in enumerate(self.tree.segments)
            )
        parts = list_ancestors_in_window(self.tree, boundaries, window, context_rank, context)
        sizes = ((part.queries, part.keys) for part in parts)
        return sum((queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in sizes)

    def _is_within(self, window: int | None) -> bool:
        """Return whether every sequence of the tree fits the window."""
        assert self.tree is not None
        ends = (segment.begin + length for segment, length in zip(self.tree.segments, self.padded_lengths, strict=True))
        return window is None or max(ends) <= window

    def _group_attending(self, window: int | None, context: int = 1) -> list[tuple[list[int], int, bool]]:
        """Return (lengths, longest, whether a mask is needed) of each group of sequences that attention batches."""
        together: dict[int, list[int]] = defaultdict(list)
        for length in self.padded_lengths:
            together[length.bit_length() if self.is_packed else 0].append(length)
        batches = []
        for lengths in together.values():
            longest = max(lengths)
            has_mask = len(set(lengths)) > 1 if self.tree is None else context > 1
            batches.append((lengths, longest, has_mask or (window is not None and window < longest)))
        return batches

    def delta_rule(self, model: ModelConfig, shards: int) -> DeltaFlops:
        """Return the operations of a layer's gated delta rule on one of the `shards` ranks that split its groups."""
        shape = DeltaShape.from_model(model)
        forward = backward = needed = 0
        for lengths, has_earlier, has_later in self._group_delta():
            padded = count_delta_flops(shape, max(lengths), has_earlier=has_earlier, has_later=has_later)
            forward += len(lengths) * padded.forward
            backward += len(lengths) * padded.backward
            needed += sum(count_delta_flops(shape, length).needed for length in lengths)
        return DeltaFlops(forward // shards, backward // shards, needed // shards)

    def _group_delta(self) -> Iterator[tuple[list[int], bool, bool]]:
        """Yield (lengths, whether earlier and whether later tokens exist) of sequences that are computed together."""
        if self.tree is None:
            yield from ((lengths, False, False) for lengths, *_ in self._group_attending(None))
            return
        for members in group_by_depth(self.tree, self.padded_lengths):
            segments = [(number, self.tree.segments[number]) for number in members]
            has_later = any(segment.end > number + 1 for number, segment in segments)
            yield [self.padded_lengths[number] for number in members], segments[0][1].parent is not None, has_later

    def predicting(self, *, all_tokens: bool) -> list[tuple[int, int]]:
        """Return, for each sequence, the range (first, last + 1) of tokens whose predictions are read.

        If `all_tokens`, all predictions are read, including those of the padding after a shorter sequence. Otherwise
        only predictions of tokens with a loss are read.
        """
        if self.tree is not None:
            return [self._find_read(number, all_tokens=all_tokens) for number in range(len(self.lengths))]
        if all_tokens:
            return [(0, min(length, self.width - 1) if self.is_packed else self.width - 1) for length in self.lengths]
        return [(max(0, self.prompt_tokens - 1), length - 1) for length in self.lengths]

    def _find_read(self, number: int, *, all_tokens: bool) -> tuple[int, int]:
        """Return the range (first, last + 1) of a segment's tokens whose predictions are read."""
        assert self.tree is not None
        segment = self.tree.segments[number]
        if all_tokens:
            return 0, min(segment.length, self.width - 1 - segment.begin)
        is_last = segment.end == number + 1  # of its sequence
        return max(0, self.prompt_tokens - 1 - segment.begin), segment.length - is_last


def count_causal_pairs(length: int, window: int | None) -> float:
    """Return the number of (query, key) pairs of causal attention in a sequence; the diagonal counts half."""
    if window is None or window >= length:
        return length**2 / 2
    return length * window - window**2 / 2

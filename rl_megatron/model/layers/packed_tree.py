"""The positions of a prefix tree's tokens on this rank, computed once per step for all model chunks and layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.model.layers.packed import PackedSequences, build_causal_bias
from rl_megatron.topology.degrees import zigzag_slices
from rl_megatron.topology.token_layout import zigzag_index


@dataclass(frozen=True)
class AttentionPart:
    """Consecutive queries of this rank and the consecutive keys, all of ancestors, to which they attend.

    Attributes:
        queries: The tokens of the rank.
        keys: The tokens of the pack, without padding.
        key_position: The position of the first key in its sequences.
        query_position: The position of the first query, if the queries follow each other in their sequences.
    """

    queries: slice
    keys: slice
    key_position: int
    query_position: int | None = None

    def build_bias(self, window: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Return what to add to the scores [queries, keys], or None if each query attends to all of the keys."""
        assert self.query_position is not None
        num_queries, num_keys = (part.stop - part.start for part in (self.queries, self.keys))
        positions = torch.arange(num_queries, device=device) + (self.query_position - self.key_position)
        if self.query_position + num_queries - window <= self.key_position:
            return None
        return build_causal_bias(positions, num_keys, window, dtype)


@dataclass(frozen=True)
class FlashCall:
    """A call of the flash kernel: some of this rank's queries attend to consecutive keys each.

    The kernel computes pairs of consecutive queries and consecutive keys. Queries that do not attend to anything in
    this call are paired with no keys, and keys that nothing attends to with no queries.

    Attributes:
        query_starts: [pairs + 1] int32, the cumulative numbers of queries.
        key_starts: [pairs + 1] int32, the cumulative numbers of keys.
        most_queries: The largest number of queries of a pair.
        most_keys: The largest number of keys of a pair.
        is_causal: Whether a pair's queries are at the positions of its last keys, and attend to no later ones.
        num_pairs: The number of queries times keys, of all pairs.
        reads: [T] bool, whether each of the rank's queries attends to keys; None if all of them do.
    """

    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int
    num_pairs: int
    is_causal: bool
    reads: Tensor | None

    @property
    def sizes(self) -> tuple[Tensor, Tensor, int, int]:
        """Return the kernel's arguments: `query_starts`, `key_starts`, `most_queries` and `most_keys`."""
        return self.query_starts, self.key_starts, self.most_queries, self.most_keys

    @classmethod
    def from_pairs(
        cls, pairs: Sequence[tuple[slice, slice]], num_queries: int, num_keys: int, *, is_causal: bool
    ) -> FlashCall:
        """Return the call of pairs of queries and keys, both in ascending order."""
        counts, reads, query, key = [], torch.zeros(num_queries, dtype=torch.bool), 0, 0
        for queries, keys in [*pairs, (slice(num_queries, num_queries), slice(num_keys, num_keys))]:
            attending = (queries.stop - queries.start, keys.stop - keys.start)
            sizes = ((queries.start - query, 0), (0, keys.start - key), attending)
            counts += [size for size in sizes if any(size)]
            reads[queries] = True
            query, key = queries.stop, keys.stop
        starts = torch.tensor([(0, 0), *counts]).cumsum(0).int()
        query_counts, key_counts = zip(*counts, strict=True)
        # If no pair had more than one query, the kernel would take every pair to have one.
        return cls(
            starts[:, 0].contiguous(), starts[:, 1].contiguous(), max(2, *query_counts), max(key_counts),
            sum(queries * keys for queries, keys in counts), is_causal, None if reads.all() else reads,
        )  # fmt: skip


@dataclass(frozen=True)
class SegmentBatch:
    """b segments of similar length, none of which is above another, padded to the length L of the longest.

    Attributes:
        segments: Their indices.
        keys: [b·L] For each position of each segment, the index of its token in the pack.
        key_shape: (b, L).
        lengths: [b] Their lengths without padding.
    """

    segments: tuple[int, ...]
    keys: Tensor
    key_shape: tuple[int, int]
    lengths: Tensor


@dataclass(frozen=True, eq=False)
class PackedTree(PackedSequences):
    """The segments of a tree, each padded and split zigzag over context-parallel ranks.

    It is a `PackedSequences` of segments, with these differences. `positions` and `longest` count from the start of
    whole sequences. The `keys` of a bucket are numbered in the order of the pack, not in rank order.

    Attributes:
        tree: The segments.
        boundaries: `starts` as numbers on the host.
        own_keys: [T] For each token of the pack, its index among the concatenated keys of all buckets.
        order: [T] For each token of the pack, its index among all ranks' tokens in rank order; None on one rank.
        batches: All segments, in an order in which each one comes after those above it.
        batch_slots: [T] For each token of the pack, its index among the concatenated keys of `batches`.
        flash_calls: The whole attention without a window.
        cp_rank: This rank among the context-parallel ranks.
        cp_size: The number of context-parallel ranks.
    """

    tree: PrefixTree
    boundaries: tuple[int, ...]
    own_keys: Tensor
    order: Tensor | None
    batches: tuple[SegmentBatch, ...]
    batch_slots: Tensor
    flash_calls: tuple[FlashCall, ...]
    cp_rank: int
    cp_size: int

    @classmethod
    def from_tree(
        cls, tree: PrefixTree, padded_lengths: Sequence[int], cp_group: dist.ProcessGroup | None
    ) -> PackedTree:
        """Return the positions of a tree, with tensors on the CPU.

        Args:
            tree: The segments.
            padded_lengths: The padded length of each segment over all ranks. Under context parallelism they are
                multiples of 2·cp.
            cp_group: The context-parallel ranks that share the pack, or None for one rank.
        """
        rank, size = (0, 1) if cp_group is None else (cp_group.rank(), cp_group.size())
        local = PackedSequences.from_padded_lengths(padded_lengths, cp_group)
        whole = local if size == 1 else PackedSequences.from_padded_lengths(padded_lengths, None)
        begins = torch.tensor([segment.begin for segment in tree.segments])
        boundaries = tuple(local.starts.tolist())
        return cls(
            local.positions + begins.repeat_interleave(torch.tensor(padded_lengths) // size),
            local.slots,
            tuple(replace(mine, keys=all_.keys) for mine, all_ in zip(local.buckets, whole.buckets, strict=True)),
            local.starts,
            max(segment.begin + length for segment, length in zip(tree.segments, padded_lengths, strict=True)),
            tree,
            boundaries,
            whole.slots,
            None if size == 1 else _find_rank_order(padded_lengths, size),
            *_batch_by_depth(tree, padded_lengths),
            _plan_flash_calls(tree, boundaries, rank, size),
            rank,
            size,
        )

    def list_ancestors(self) -> Iterator[AttentionPart]:
        """Yield the attention to each segment with others below it, of all tokens below it."""
        for index, below, keys in _list_ancestors(self.tree, self.boundaries, self.cp_size):
            yield AttentionPart(below, keys, self.tree.segments[index].begin)

    def list_ancestors_in_window(self, window: int) -> Iterator[AttentionPart]:
        """Yield the attention to ancestors if a token attends to the `window` - 1 tokens before it."""
        yield from list_ancestors_in_window(self.tree, self.boundaries, window, self.cp_rank, self.cp_size)


def list_ancestors_in_window(
    tree: PrefixTree, boundaries: Sequence[int], window: int, cp_rank: int, cp_size: int
) -> Iterator[AttentionPart]:
    """Yield the attention to ancestors of a rank's tokens if a token attends to the `window` - 1 tokens before it.

    It has the queries that attend to at least one key of the ancestor, and all keys that one of them attends to.
    `boundaries` are the cumulative padded lengths of the segments over all ranks.
    """
    for index, segment in enumerate(tree.segments):
        for queries, first in _list_runs(segment.begin, boundaries[index : index + 2], cp_rank, cp_size):
            ancestor = segment.parent
            while ancestor is not None:
                above, start = tree.segments[ancestor], boundaries[ancestor]
                seeing = min(queries.stop - queries.start, above.begin + above.length + window - 1 - first)
                if seeing <= 0:
                    break
                begin = max(above.begin, first - window + 1)
                keys = slice(start + begin - above.begin, start + above.length)
                yield AttentionPart(slice(queries.start, queries.start + seeing), keys, begin, first)
                ancestor = above.parent


def _list_runs(begin: int, boundaries: Sequence[int], cp_rank: int, cp_size: int) -> Iterator[tuple[slice, int]]:
    """Yield a rank's tokens of a segment that follow each other in its sequences, with their first position."""
    start, stop = (boundary // cp_size for boundary in boundaries)
    if cp_size == 1:
        yield slice(start, stop), begin
        return
    size = (stop - start) // 2
    yield slice(start, start + size), begin + cp_rank * size
    yield slice(start + size, stop), begin + (zigzag_slices(cp_size) - 1 - cp_rank) * size


def _list_ancestors(tree: PrefixTree, boundaries: Sequence[int], cp_size: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (segment, a rank's tokens below it, its tokens without padding) of each segment with others below it."""
    for index, segment in enumerate(tree.segments):
        if segment.end > index + 1:
            below = slice(boundaries[index + 1] // cp_size, boundaries[segment.end] // cp_size)
            yield index, below, slice(boundaries[index], boundaries[index] + segment.length)


def _plan_flash_calls(tree: PrefixTree, boundaries: Sequence[int], cp_rank: int, cp_size: int) -> tuple[FlashCall, ...]:
    """Return one call for each level of ancestors, and before them the calls of the segments' own keys.

    Those are one call, or under context parallelism one for each of the rank's two slices of a segment.
    """
    own_pairs: list[list[tuple[slice, slice]]] = [[] for _ in range(min(cp_size, 2))]
    slices = (cp_rank, zigzag_slices(cp_size) - 1 - cp_rank)
    for start, stop in pairwise(boundaries):
        local, cp_slice = start // cp_size, (stop - start) // zigzag_slices(cp_size)
        for number, (pairs, index) in enumerate(zip(own_pairs, slices, strict=False)):
            queries = slice(local + number * cp_slice, local + (number + 1) * cp_slice)
            pairs.append((queries, slice(start, start + (index + 1) * cp_slice)))
    levels: dict[int, list[tuple[slice, slice]]] = defaultdict(list)
    depths = _find_depths(tree)
    for index, below, keys in _list_ancestors(tree, boundaries, cp_size):
        levels[depths[index]].append((below, keys))
    sizes = (boundaries[-1] // cp_size, boundaries[-1])
    return (
        *(FlashCall.from_pairs(pairs, *sizes, is_causal=True) for pairs in own_pairs),
        *(FlashCall.from_pairs(pairs, *sizes, is_causal=False) for _, pairs in sorted(levels.items())),
    )


def _find_depths(tree: PrefixTree) -> list[int]:
    """Return the number of segments above each segment."""
    depths: list[int] = []
    for segment in tree.segments:
        depths.append(0 if segment.parent is None else depths[segment.parent] + 1)
    return depths


def group_by_depth(tree: PrefixTree, padded_lengths: Sequence[int]) -> list[list[int]]:
    """Return the indices of all segments, those of similar length and equal depth together, the highest first."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (depth, length) in enumerate(zip(_find_depths(tree), padded_lengths, strict=True)):
        alike[depth, length.bit_length()].append(index)
    return [members for _, members in sorted(alike.items())]


def _batch_by_depth(tree: PrefixTree, padded_lengths: Sequence[int]) -> tuple[tuple[SegmentBatch, ...], Tensor]:
    """Return `PackedTree.batches` and `PackedTree.batch_slots`."""
    padded = torch.tensor(padded_lengths)
    starts = padded.cumsum(0) - padded
    batches, slots, num_slots = [], torch.empty(int(padded.sum()), dtype=torch.long), 0
    for members in group_by_depth(tree, padded_lengths):
        length = max(padded_lengths[index] for index in members)
        within = torch.arange(length)
        keys, is_own = starts[members][:, None] + within, within < padded[members][:, None]
        slots[keys[is_own]] = num_slots + is_own.flatten().nonzero()[:, 0]
        num_slots += keys.numel()
        lengths = torch.tensor([tree.segments[index].length for index in members])
        batches.append(SegmentBatch(tuple(members), keys.where(is_own, 0).flatten(), (len(members), length), lengths))
    return tuple(batches), slots


def _find_rank_order(padded_lengths: Sequence[int], cp_size: int) -> Tensor:
    """Return, for each token of a pack, its index among all ranks' tokens in rank order."""
    lengths = torch.tensor(padded_lengths)
    starts, num_local = lengths.cumsum(0) - lengths, sum(padded_lengths) // cp_size
    index = zigzag_index(lengths, starts, lengths, max(padded_lengths), num_local, cp_size)
    return index[index >= 0]

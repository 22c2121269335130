"""The positions of a pack's sequences on this rank, computed once per step for all model chunks and layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.topology.degrees import zigzag_slices
from rl_megatron.topology.token_layout import zigzag_index

_ALIGNED_NUMBERS = 16
_Bias = TypeVar("_Bias", Tensor, Tensor | None)


@dataclass(frozen=True)
class Bucket:
    """b sequences of similar length, which attention computes as one batch padded to the length L of the longest.

    No sequence is twice as long as another. Positions beyond a sequence's end read arbitrary tokens: no query within
    the sequence attends to them, and the output of queries beyond the end is dropped.

    Attributes:
        keys: [b·L] For each position of each sequence, the index of its token among all ranks' tokens in rank order.
        queries: [b·L/cp] For each of these positions that this rank has, the index of its token among this rank's
            tokens.
        positions: [b, L/cp] The positions of these queries within their sequences.
        key_shape: (b, L).
        is_even: Whether all sequences occupy L positions, padding included.
    """

    keys: Tensor
    queries: Tensor
    positions: Tensor
    key_shape: tuple[int, int]
    is_even: bool

    @property
    def query_shape(self) -> tuple[int, int]:
        """Return (b, L/cp)."""
        num_sequences, length = self.positions.shape
        return num_sequences, length


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """The sequences of one pack of T tokens, each padded and split zigzag over context-parallel ranks.

    Attributes:
        positions: [T/cp] The positions of this rank's tokens within their sequences.
        slots: [T/cp] For each of this rank's tokens, its index among the concatenated queries of all buckets.
        buckets: The sequences by length.
        starts: [sequences + 1] int32, the cumulative padded lengths (cu_seqlens) of the pack over all ranks.
        longest: The longest padded length.
    """

    positions: Tensor
    slots: Tensor
    buckets: tuple[Bucket, ...]
    starts: Tensor
    longest: int

    @property
    def is_one_batch(self) -> bool:
        """Return whether the pack already is one batch in the same order, so that no token has to be moved."""
        return len(self.buckets) == 1 and math.prod(self.buckets[0].query_shape) == len(self.slots)

    def unpack(self, tokens: Tensor) -> Sequence[Tensor]:
        """Return the tokens [T, …] as one batch [b, L, …] per bucket. Context parallelism is not supported."""
        batches = (tokens,) if self.is_one_batch else _Unpack.apply(tokens, self.slots, *self._indices)
        return [batch.unflatten(0, bucket.query_shape) for batch, bucket in zip(batches, self.buckets, strict=True)]

    def pack(self, batches: Sequence[Tensor]) -> Tensor:
        """Return this rank's tokens [T/cp, …], given each bucket's batch [b·L/cp, …]."""
        return batches[0] if self.is_one_batch else _Pack.apply(self.slots, *batches)

    def unpack_filled(self, tokens: Tensor, fill: float) -> list[Tensor]:
        """Return this rank's tokens as one batch [b, L/cp, …] per bucket, with `fill` beyond a sequence's end."""
        sizes = [math.prod(bucket.query_shape) for bucket in self.buckets]
        whole = tokens.new_full((sum(sizes), *tokens.shape[1:]), fill).index_copy_(0, self.slots, tokens)
        batches = zip(whole.split(sizes), self.buckets, strict=True)
        return [batch.unflatten(0, bucket.query_shape) for batch, bucket in batches]

    @cached_property
    def key_slots(self) -> Tensor:
        """Return, for each token of all ranks in rank order, its index [T] among the concatenated keys of all buckets.

        Keys beyond a sequence's end also refer to token 0; the first key that does so is its own.
        """
        (_, length), (_, local_length) = self.buckets[0].key_shape, self.buckets[0].query_shape
        keys = torch.cat([bucket.keys for bucket in self.buckets])
        slots = torch.arange(len(keys), device=keys.device)
        places = keys.new_empty(len(self.slots) * length // local_length)
        return places.scatter_reduce_(0, keys, slots, "amin", include_self=False)

    @property
    def _indices(self) -> list[Tensor]:
        return [bucket.queries for bucket in self.buckets]

    @classmethod
    def from_padded_lengths(cls, padded_lengths: Sequence[int], cp_group: dist.ProcessGroup | None) -> PackedSequences:
        """Return the sequences of a pack, with tensors on the CPU.

        Args:
            padded_lengths: The length of each sequence in tokens, padding included, over all ranks. Under context
                parallelism they are multiples of 2·cp.
            cp_group: The context-parallel ranks that share the pack, or None for one rank.
        """
        cp_size, cp_rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
        padded = torch.tensor(padded_lengths)
        start, local_length, num_local = padded.cumsum(0) - padded, padded // cp_size, sum(padded_lengths) // cp_size
        sequence_of = torch.arange(len(padded_lengths)).repeat_interleave(local_length)
        within = torch.arange(num_local) - (start // cp_size)[sequence_of]  # index in this rank's part of a sequence
        slice_length = (padded // zigzag_slices(cp_size))[sequence_of]
        head = cp_rank * slice_length + within
        tail = (zigzag_slices(cp_size) - 1 - cp_rank) * slice_length + within - slice_length
        positions = torch.where(within < slice_length, head, tail)

        by_length: dict[int, list[int]] = defaultdict(list)
        for sequence, length in enumerate(padded_lengths):
            by_length[length.bit_length()].append(sequence)
        buckets, slots, num_slots = [], torch.empty(num_local, dtype=torch.long), 0
        for members in by_length.values():
            length = max(padded_lengths[sequence] for sequence in members)
            place_in_bucket = torch.full((len(padded_lengths),), -1)
            place_in_bucket[members] = torch.arange(len(members))
            tokens = (place_in_bucket[sequence_of] >= 0).nonzero()[:, 0]  # this rank's tokens of these sequences
            slot = place_in_bucket[sequence_of[tokens]] * (length // cp_size) + within[tokens]
            queries, query_positions = torch.zeros(2, len(members) * length // cp_size, dtype=torch.long)
            queries[slot], query_positions[slot] = tokens, positions[tokens]
            slots[tokens] = num_slots + slot
            num_slots += len(queries)
            keys = zigzag_index(padded[members], start[members], padded[members], length, num_local, cp_size)
            buckets.append(
                Bucket(
                    keys.clamp(min=0).flatten(),
                    queries,
                    query_positions.view(len(members), -1),
                    (len(members), length),
                    is_even=all(padded_lengths[member] == length for member in members),
                )
            )
        starts = torch.cat([start, padded.sum()[None]]).int()
        return cls(positions, slots, tuple(buckets), starts, max(padded_lengths))


class _Unpack(torch.autograd.Function):
    """Gather the tokens of each bucket. The gradient of positions beyond a sequence's end is 0, and is not read."""

    @staticmethod
    def forward(ctx, tokens: Tensor, slots: Tensor, *indices: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(slots)
        return tuple(tokens.index_select(0, index) for index in indices)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return torch.cat(gradients).index_select(0, slots), None, *(None for _ in gradients)


class _Pack(torch.autograd.Function):
    """Gather the tokens of the pack from the batches of all buckets."""

    @staticmethod
    def forward(ctx, slots: Tensor, *batches: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.sizes = [len(batch) for batch in batches]
        return torch.cat(batches).index_select(0, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        whole = gradient.new_zeros(sum(ctx.sizes), *gradient.shape[1:])
        return None, *whole.index_copy_(0, slots, gradient).split(ctx.sizes)


def build_causal_mask(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Return a mask […, q, length]: true if a query, at `positions` […, q], may attend to a key, at 0 … length − 1.

    A query attends to itself and to all keys before it or, with a window, to the nearest `window` of these.
    """
    keys = torch.arange(length, device=positions.device)
    is_earlier = keys <= positions[..., None]
    return is_earlier if window is None else is_earlier & (keys > positions[..., None] - window)


def build_causal_bias(positions: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return `build_causal_mask` as numbers to add to scores: 0 if the query may attend to the key, otherwise −inf.

    From a bool mask, torch would compute a bias in each layer, and autograd would keep all of them. On a GPU, torch
    also copies a bias in each layer, unless its rows begin at multiples of 16 elements. So its rows are padded in
    memory.
    """
    seen = build_causal_mask(positions, length, window)
    columns = -(-length // _ALIGNED_NUMBERS) * _ALIGNED_NUMBERS
    bias = torch.full((*positions.shape, columns), -torch.inf, dtype=dtype, device=positions.device)[..., :length]
    return bias.masked_fill_(seen, 0.0)


class LastBiases:
    """The attention biases of the current sequences: made once for all layers, and freed if the sequences change."""

    def __init__(self) -> None:
        self._sequences: object = None
        self._biases: dict[Hashable, Any] = {}

    def get(self, sequences: object, key: Hashable, make: Callable[[], _Bias]) -> _Bias:
        """Return the bias of these sequences with this key, made by `make` if it does not exist yet.

        If `sequences` differs from that of the last call, all earlier biases are freed.
        """
        if sequences != self._sequences:
            self.clear()
            self._sequences = sequences
        if key not in self._biases:
            self._biases[key] = make()
        return self._biases[key]

    def clear(self) -> None:
        self._sequences = None
        self._biases.clear()

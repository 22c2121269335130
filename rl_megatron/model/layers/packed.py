"""The positions of a pack's sequences on this rank, computed once per microbatch for all model chunks and layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.topology.degrees import zigzag_slices
from rl_megatron.topology.token_layout import zigzag_places


@dataclass(frozen=True)
class Bucket:
    """b sequences of similar length, which attend together as a batch padded to the length L of the longest.

    No sequence is twice as long as another. Positions beyond a sequence's end read arbitrary tokens: no query within
    the sequence attends to them, and the output of queries beyond the end is dropped.

    Attributes:
        keys: [b·L] The index of each position of each sequence among all ranks' tokens, in rank order.
        queries: [b·L/cp] The index of each of this rank's positions among this rank's tokens.
        positions: [b, L/cp] The positions of these queries within their sequences.
        key_shape: (b, L).
    """

    keys: Tensor
    queries: Tensor
    positions: Tensor
    key_shape: tuple[int, int]
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict, repr=False)

    @property
    def query_shape(self) -> tuple[int, int]:
        """Return (b, L/cp)."""
        num_sequences, length = self.positions.shape
        return num_sequences, length

    def mask(self, window: int | None) -> Tensor | None:
        """Return the mask [b, 1, L/cp, L], true if a query attends to a key. It is made once for all layers.

        The result is None if plain causal attention needs no mask: without context parallelism and without a window
        shorter than L.
        """
        if window not in self._masks:
            length = self.key_shape[1]
            plain = self.query_shape == self.key_shape and (window is None or window >= length)
            self._masks[window] = None if plain else causal_mask(self.positions, length, window)[:, None]
        return self._masks[window]


@dataclass(frozen=True)
class PackedSequences:
    """The sequences of one pack of T tokens, each padded and split zigzag over context-parallel ranks.

    Attributes:
        positions: [T/cp] The positions of this rank's tokens within their sequences.
        slots: [T/cp] The index of each of this rank's tokens among the queries of all buckets, in order.
        buckets: The sequences by length.
        longest: The longest padded length.
    """

    positions: Tensor
    slots: Tensor
    buckets: tuple[Bucket, ...]
    longest: int

    @classmethod
    def of(
        cls, padded_lengths: Sequence[int], cp_group: dist.ProcessGroup | None, device: torch.device
    ) -> PackedSequences:
        """Return the sequences of a pack.

        Args:
            padded_lengths: The length of each sequence in tokens, padding included, over all ranks. Under context
                parallelism they are multiples of 2·cp.
            cp_group: The context-parallel ranks that share the pack, or None for one rank.
            device: The device of the model.
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
            keys = zigzag_places(padded[members], start[members], padded[members], length, num_local, cp_size)
            buckets.append(
                Bucket(
                    keys.clamp(min=0).flatten().to(device),
                    queries.to(device),
                    query_positions.view(len(members), -1).to(device),
                    (len(members), length),
                )
            )
        return cls(positions.to(device), slots.to(device), tuple(buckets), max(padded_lengths))


def causal_mask(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Return a mask […, q, length], true if the query at `positions` […, q] may attend to key 0 … length − 1.

    A query attends to itself and to all keys before it or, with a window, to the nearest `window` of these.
    """
    keys = torch.arange(length, device=positions.device)
    before = keys <= positions[..., None]
    return before if window is None else before & (keys > positions[..., None] - window)

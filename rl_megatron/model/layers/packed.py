"""Where the sequences of a packed row lie on this rank: computed once for a microbatch, for every chunk and layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.topology.context_parallel import zigzag_slices
from rl_megatron.topology.token_layout import zigzag_places


@dataclass(frozen=True)
class Bucket:
    """Sequences of like length (none twice as long as another) as rows that attend together, padded to the longest, L.

    keys: [b·L] where each row's positions lie among all ranks' tokens, in rank order.
    queries: [b·L/cp] where each row's positions on this rank lie among this rank's tokens.
    positions: [b, L/cp] of these queries within their sequence.

    What is past a row's end reads any token: no query within the row looks that far, and what a query past it finds is
    dropped.
    """

    keys: Tensor
    queries: Tensor
    positions: Tensor
    key_shape: tuple[int, int]
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict, repr=False)

    @property
    def query_shape(self) -> tuple[int, int]:
        num_sequences, length = self.positions.shape
        return num_sequences, length

    def mask(self, window: int | None) -> Tensor | None:
        """[b, 1, L/cp, L], which keys a query looks at; None where plain causal attention says it. Made once for all
        layers."""
        if window not in self._masks:
            length = self.key_shape[1]
            plain = self.query_shape == self.key_shape and (window is None or window >= length)
            self._masks[window] = None if plain else causal_mask(self.positions, length, window)[:, None]
        return self._masks[window]


@dataclass(frozen=True)
class PackedSequences:
    """The sequences of one packed row, each padded, cut zigzag over context-parallel ranks.

    positions: [T/cp] of this rank's tokens within their sequences.
    slots: [T/cp] where this rank's tokens lie among the queries of all buckets, one bucket after the other.
    longest: the longest padded length.
    """

    positions: Tensor
    slots: Tensor
    buckets: tuple[Bucket, ...]
    longest: int

    @classmethod
    def of(
        cls, padded_lengths: Sequence[int], cp_group: dist.ProcessGroup | None, device: torch.device
    ) -> PackedSequences:
        """Return the rows of a pack.

        Args:
            padded_lengths: Tokens of each sequence in the pack, padding included, over all ranks; multiples of 2·cp
                under context parallelism.
            cp_group: The context-parallel ranks that share the row; None for one rank.
            device: Where the model runs.
        """
        cp_size, cp_rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
        padded = torch.tensor(padded_lengths)
        start, local_length, num_local = padded.cumsum(0) - padded, padded // cp_size, sum(padded_lengths) // cp_size
        sequence_of = torch.arange(len(padded_lengths)).repeat_interleave(local_length)
        within = torch.arange(num_local) - (start // cp_size)[sequence_of]  # this rank's part of its sequence
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
            mine = (place_in_bucket[sequence_of] >= 0).nonzero()[:, 0]  # this rank's tokens of these sequences
            slot = place_in_bucket[sequence_of[mine]] * (length // cp_size) + within[mine]
            queries, query_positions = torch.zeros(2, len(members) * length // cp_size, dtype=torch.long)
            queries[slot], query_positions[slot] = mine, positions[mine]
            slots[mine] = num_slots + slot
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
    """[…, q, length], true where the query at `positions` […, q] may look at key 0 … length − 1: itself and what is
    before it, or of that the nearest `window`."""
    keys = torch.arange(length, device=positions.device)
    before = keys <= positions[..., None]
    return before if window is None else before & (keys > positions[..., None] - window)

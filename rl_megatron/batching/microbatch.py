"""A microbatch: sequences that go through the model together, before the model's layout cuts them over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rl_megatron.batching.packing import round_up
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology.degrees import SequenceLayout, zigzag_slices


@dataclass(frozen=True)
class Microbatch:
    """Sequences that go through the model together, whole on every rank.

    Attributes:
        batch: The sequences, `[b, S]`.
        lengths: `[b]` tokens of each sequence, if the model gets them as one pack. None if it gets each sequence padded
            to S tokens.
    """

    batch: BatchedDataDict
    lengths: tuple[int, ...] | None = None

    def shape(self, layout: SequenceLayout) -> tuple[int, int]:
        """Return (sequences, padded tokens of each over all ranks) that the model gets; a pack is one sequence."""
        if self.lengths is not None:
            return 1, sum(padded_lengths(self.lengths, layout))
        num_sequences, width = self.batch["input_ids"].shape
        return num_sequences, round_up(width, layout.sequence_multiple)

    def with_zero_weight(self) -> Microbatch:
        """Return the same sequences with zero loss weight: they run like any other and add nothing."""
        batch = BatchedDataDict(self.batch)
        for mask in ("sample_mask", "token_mask"):
            if mask in batch:
                batch[mask] = torch.zeros_like(batch[mask])
        return replace(self, batch=batch)


def padded_lengths(lengths: Sequence[int], layout: SequenceLayout) -> list[int]:
    """Return the tokens that each sequence of a pack occupies, padding included.

    Each is a multiple of 2·cp if context parallelism cuts it into that many slices. The last one is longer if that is
    needed to divide the whole pack over the sequence-parallel ranks too.
    """
    multiple = zigzag_slices(layout.context)
    padded = [round_up(max(length, 1), multiple) for length in lengths]
    total = sum(padded)
    padded[-1] += round_up(total, layout.sequence_multiple) - total
    return padded

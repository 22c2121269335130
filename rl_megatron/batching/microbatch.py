"""Microbatches: the sequences that go through the model together, and the plan of an optimizer step's microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from rl_megatron.batching.config import Batching
from rl_megatron.batching.packing import round_up
from rl_megatron.batching.prefix_tree import PrefixTree
from rl_megatron.batching.shared_prefixes import SharedPrefixes
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology.degrees import SequenceLayout, zigzag_slices

PADDING = -1
"""The value that marks a padding sequence among the sequence numbers of a microbatch."""


@dataclass(frozen=True)
class Microbatch:
    """Sequences that go through the model together, before they are sliced for context parallelism.

    Attributes:
        batch: The sequences, `[b, S]`.
        lengths: `[b]` The number of tokens of each sequence, if the sequences are concatenated into one pack. None if
            each sequence is padded to S tokens.
        tree: The segments of the pack if its sequences share tokens; None if each has its own.
    """

    batch: BatchedDataDict
    lengths: tuple[int, ...] | None = None
    tree: PrefixTree | None = None

    @property
    def packed_lengths(self) -> Sequence[int] | None:
        """Return the number of tokens of each sequence of the pack, or of each segment of its tree."""
        return self.lengths if self.tree is None else [segment.length for segment in self.tree.segments]

    def shape(self, layout: SequenceLayout) -> tuple[int, int]:
        """Return (sequences, padded length) of the model's input, before ranks slice it; a pack is one sequence."""
        if self.packed_lengths is not None:
            return 1, sum(padded_lengths(self.packed_lengths, layout))
        num_sequences, width = self.batch["input_ids"].shape
        return num_sequences, round_up(width, layout.sequence_multiple)

    def with_zero_weight(self) -> Microbatch:
        """Return the same sequences with zero loss weight: they are computed, but add nothing to the loss."""
        batch = BatchedDataDict(self.batch)
        for mask in ("sample_mask", "token_mask"):
            if mask in batch:
                batch[mask] = torch.zeros_like(batch[mask])
        return replace(self, batch=batch)


def padded_lengths(lengths: Sequence[int], layout: SequenceLayout) -> list[int]:
    """Return the padded length of each sequence of a pack.

    With context parallelism, each is a multiple of 2·cp, the number of zigzag slices. The last one is padded further if
    the pack would otherwise not divide over the sequence-parallel ranks.
    """
    multiple = zigzag_slices(layout.context)
    padded = [round_up(max(length, 1), multiple) for length in lengths]
    total = sum(padded)
    padded[-1] += round_up(total, layout.sequence_multiple) - total
    return padded


@dataclass(frozen=True)
class RankMicrobatches:
    """The sequences of each microbatch of a rank, by number.

    Attributes:
        sequences: For each microbatch, the numbers of its sequences in the global batch, and `PADDING` for each padding
            sequence.
        widths: The padded length of each microbatch; only dynamic batching uses it.
        tokens: Tokens of the rank's sequences, without padding.
        slots: Tokens that the model computes for these sequences, padding included.
        largest: Tokens of the largest microbatch, padding included, before `extend` splits it.
        shares_prefixes: Whether microbatches are packs in which sequences share tokens.
    """

    sequences: list[list[int]]
    widths: list[int]
    tokens: int
    slots: int
    largest: int
    shares_prefixes: bool = False

    def extend(self, count: int, group_size: int) -> RankMicrobatches:
        """Return `count` microbatches of the same sequences by splitting the largest or adding padding microbatches."""
        microbatches = list(zip(self.sequences, self.widths, strict=True))
        slots = self.slots
        while len(microbatches) < count:
            largest = max(range(len(microbatches)), key=lambda index: len(microbatches[index][0]))
            numbers, width = microbatches[largest]
            if len(numbers) <= group_size:
                microbatches.append(([PADDING] * group_size, min(width for _, width in microbatches)))
                slots += group_size
                continue
            half = -(-len(numbers) // group_size // 2) * group_size
            microbatches[largest : largest + 1] = [(numbers[:half], width), (numbers[half:], width)]
        return replace(
            self,
            sequences=[numbers for numbers, _ in microbatches],
            widths=[width for _, width in microbatches],
            slots=slots,
        )


@dataclass(frozen=True)
class StepPlan:
    """The microbatches of one optimizer step.

    Attributes:
        start: The number of the step's first sequence in the global batch.
        stop: The number of its last sequence, plus 1.
        batching: How sequences form microbatches.
        group_size: Sequences that stay together in a microbatch.
        ranks: The microbatches of all data-parallel ranks if the batch is whole, and otherwise of this rank alone. All
            ranks have the same number of microbatches.
        efficiency: The tokens per token slot that the model computes, over all ranks. It is above 1 if sequences share
            tokens.
        index: The index of this rank in `ranks`.
        prefixes: What the sequences of the global batch share in this layout; None if they share nothing.
    """

    start: int
    stop: int
    batching: Batching
    group_size: int
    ranks: Sequence[RankMicrobatches]
    efficiency: float
    index: int = 0
    prefixes: SharedPrefixes | None = field(default=None, compare=False)

    @property
    def local(self) -> RankMicrobatches:
        """Return the microbatches of this rank."""
        return self.ranks[self.index]

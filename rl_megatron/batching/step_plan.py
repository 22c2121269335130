"""`StepPlan`: which sequences form which microbatch of an optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl_megatron.batching.config import Batching

PADDING = -1
"""It replaces the number of a sequence in microbatches that need a padding sequence."""


@dataclass(frozen=True)
class Shapes:
    """How the microbatches of a rank are formed.

    Attributes:
        sequences: The numbers of the sequences of each microbatch in the global batch, and `PADDING` for each padding
            sequence.
        widths: The columns of each microbatch if it is dynamic.
        tokens: Tokens of the sequences of the rank.
        slots: Token slots that the model computes for them.
        largest: Token slots of the largest microbatch, before it is split.
    """

    sequences: list[list[int]]
    widths: list[int]
    tokens: int
    slots: int
    largest: int

    def extended(self, count: int, group_size: int) -> Shapes:
        """Return `count` microbatches with the same sequences: the largest ones are split, or padding ones added."""
        found = list(zip(self.sequences, self.widths, strict=True))
        slots = self.slots
        while len(found) < count:
            largest = max(range(len(found)), key=lambda place: len(found[place][0]))
            chosen, width = found[largest]
            if len(chosen) <= group_size:
                found.append(([PADDING] * group_size, min(width for _, width in found)))
                slots += group_size
                continue
            half = -(-len(chosen) // group_size // 2) * group_size
            found[largest : largest + 1] = [(chosen[:half], width), (chosen[half:], width)]
        return replace(
            self, sequences=[chosen for chosen, _ in found], widths=[width for _, width in found], slots=slots
        )


@dataclass(frozen=True)
class StepPlan:
    """The microbatches of one optimizer step.

    Attributes:
        start: The number of the step's first sequence in the global batch.
        stop: The number after its last sequence.
        batching: How sequences form microbatches.
        group_size: Sequences that stay together in a microbatch.
        ranks: The microbatches of each rank whose sequences this rank has: of all data-parallel ranks if the batch is
            whole, and otherwise of this rank alone. Every rank has as many.
        efficiency: Tokens per token slot that the model computes, over all ranks.
        place: The place of this rank among `ranks`.
    """

    start: int
    stop: int
    batching: Batching
    group_size: int
    ranks: Sequence[Shapes]
    efficiency: float
    place: int = 0

    @property
    def shapes(self) -> Shapes:
        """Return the microbatches of this rank."""
        return self.ranks[self.place]

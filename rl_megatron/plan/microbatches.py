"""How many sequences the microbatches of a rank have, if all are equally long: as rl_megatron/batching plans them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rl_megatron.batching.config import BatchingKind


@dataclass(frozen=True)
class MicrobatchSizes:
    """The microbatches of one global batch on the data-parallel rank that has the most sequences.

    Attributes:
        counts: (sequences of a microbatch, how many such microbatches there are), the largest first. Padding sequences
            as wide as others are included, and so are microbatches that only fill an interleaved pipeline.
    """

    counts: tuple[tuple[int, int], ...]

    @classmethod
    def from_sequences(
        cls, sequences: int, data: int, most: int, kind: BatchingKind, *, group_size: int = 1, multiple: int = 1
    ) -> MicrobatchSizes:
        """Return the microbatches of a global batch.

        Args:
            sequences: The sequences of the global batch, over all ranks.
            data: The data-parallel ranks.
            most: The most sequences of a microbatch.
            kind: `train.batching`.
            group_size: The sequences that have to share a microbatch.
            multiple: The number of microbatches is a multiple of this: the stages of an interleaved pipeline.
        """
        groups = -(-sequences // (data * group_size))  # of the rank; padding sequences have one token, unless padded
        most = min(most, groups * group_size)
        number = -(-groups * group_size // most)
        if kind == "padded":
            counts = Counter({most: number})
        elif kind == "dynamic":
            counts = Counter({most: groups * group_size // most})
            counts[groups * group_size % most] += 1
        else:  # packs of equal cost
            fewer, with_more = divmod(groups, number)
            counts = Counter({(fewer + 1) * group_size: with_more, fewer * group_size: number - with_more})
        present = {size: count for size, count in counts.items() if size and count}
        present[min(present)] += -number % multiple  # the shortest is repeated
        return cls(tuple(sorted(present.items(), reverse=True)))

    @property
    def number(self) -> int:
        """Return how many microbatches there are."""
        return sum(count for _, count in self.counts)

    @property
    def largest(self) -> int:
        """Return the sequences of the largest microbatch."""
        return self.counts[0][0]

    @property
    def smallest(self) -> int:
        """Return the sequences of the smallest microbatch."""
        return self.counts[-1][0]

    @property
    def sequences(self) -> int:
        """Return the sequences of all microbatches."""
        return sum(size * count for size, count in self.counts)

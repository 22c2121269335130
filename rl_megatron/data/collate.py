"""Turn lists of token ids into tensors padded on the right, and spans of positions into masks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_megatron.data.batch import BatchedDataDict


@dataclass(frozen=True)
class Padding:
    """The rule by which lists of token ids become a tensor `[B, S]`.

    Attributes:
        pad_id: The token id that lists are padded with, on the right.
        multiple: S is the length of the longest list, rounded up to a multiple of this.

    Raises:
        ValueError: `multiple` is below 1.
    """

    pad_id: int
    multiple: int

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1, got {self.multiple}.")

    def collate(self, sequences: list[list[int]]) -> BatchedDataDict:
        """Return `input_ids` `[B, S]` with S ≥ 1, `input_lengths` `[B]` and a `sample_mask` `[B]` of ones.

        Raises:
            ValueError: There is no sequence.
        """
        if not sequences:
            raise ValueError("a batch needs at least one sequence, got none.")
        lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.long)
        width = -(-max(int(lengths.max()), 1) // self.multiple) * self.multiple
        return BatchedDataDict(
            input_ids=torch.tensor([sequence + [self.pad_id] * (width - len(sequence)) for sequence in sequences]),
            input_lengths=lengths,
            sample_mask=torch.ones(len(sequences)),
        )


def span_mask(starts: torch.Tensor, ends: torch.Tensor, width: int) -> torch.Tensor:
    """Return a mask `[B, width]` fp32 that is 1 from `starts[b]` to `ends[b] - 1` and 0 elsewhere."""
    positions = torch.arange(width)
    return ((positions >= starts[:, None]) & (positions < ends[:, None])).float()

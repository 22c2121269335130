"""Rows of tokens to tensors: padding on the right, and masks that are 1 over a span."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_megatron.data.batch import BatchedDataDict


@dataclass(frozen=True)
class Padding:
    """Rows of tokens to `[B, S]`, S the longest row rounded up to `multiple`."""

    pad_id: int
    multiple: int

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"pad_to_multiple_of must be at least 1, got {self.multiple}.")

    def collate(self, rows: list[list[int]]) -> BatchedDataDict:
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
        width = -(-int(lengths.max()) // self.multiple) * self.multiple
        return BatchedDataDict(
            input_ids=torch.tensor([row + [self.pad_id] * (width - len(row)) for row in rows]),
            input_lengths=lengths,
            sample_mask=torch.ones(len(rows)),
        )


def span_mask(starts: torch.Tensor, ends: torch.Tensor, width: int) -> torch.Tensor:
    """`[B, width]` fp32: 1 from `starts[b]` to `ends[b] - 1`."""
    positions = torch.arange(width)
    return ((positions >= starts[:, None]) & (positions < ends[:, None])).float()

"""Batches of random shape for any row of the table of losses, and packing them into one row of the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.contract.loss_cases import CASES, VOCAB, Batch, LossCase

# One score a row has no positions, so nothing to pack; the same losses are there with one score a token.
PACKABLE = [case for case in CASES if case.label != "scores of rows"]


@dataclass(frozen=True)
class Shape:
    """lengths [B]: tokens of each sequence, 0 allowed; width S ≥ max(lengths) of the batch; multiple: what a sequence's
    length in the pack is rounded up to; slack: positions after the last sequence."""

    lengths: tuple[int, ...]
    width: int
    multiple: int = 1
    slack: int = 0

    @classmethod
    def around(cls, lengths: list[int], wider: int, multiple: int, slack: int) -> Shape:
        """As wide as the longest sequence and `wider`; the pack has at least two positions."""
        return cls(tuple(lengths), max(1, *lengths) + wider, multiple, max(slack, 2 - sum(lengths)))

    def in_units_of(self, rows: int) -> Shape:
        """With a few more sequences of the same lengths, so that `rows` divides their number."""
        missing = -len(self.lengths) % rows
        return Shape(self.lengths + self.lengths[:missing], self.width, self.multiple, self.slack)

    @property
    def cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """(cu_seqlens, cu_seqlens_padded)."""
        lengths = torch.tensor([0, *self.lengths])
        return lengths.cumsum(0), (-(-lengths // self.multiple) * self.multiple).cumsum(0)

    @property
    def places(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and place in the pack of every token."""
        starts = self.cu_seqlens[1].tolist()
        tokens = [(row, t, starts[row] + t) for row, length in enumerate(self.lengths) for t in range(length)]
        return tuple(torch.tensor(tokens, dtype=torch.long).view(-1, 3).unbind(1))

    def pack(self, x: Tensor, fill: float) -> Tensor:
        """[B, S, …] → [1, T, …], `fill` where no token lies."""
        row, column, place = self.places
        packed = x.new_full((int(self.cu_seqlens[1][-1]) + self.slack, *x.shape[2:]), fill)
        packed[place] = x[row, column]
        return packed[None]

    def unpack(self, packed: Tensor) -> Tensor:
        """[1, T, …] → [B, S, …], 0 where no token lies."""
        row, column, place = self.places
        x = packed.new_zeros(len(self.lengths), self.width, *packed.shape[2:])
        x[row, column] = packed[0, place]
        return x


def random_batch(
    case: LossCase, shape: Shape, generator: torch.Generator, vocab_size: int = VOCAB
) -> tuple[Batch, Tensor]:
    """A batch of the case's kind and the model's output for it, fp64: values as the case draws them, random masks of
    tokens (within the sequences) and of samples."""
    rows, width = len(shape.lengths), shape.width
    left, right = case.make_batch(generator), case.make_batch(generator)
    batch = {
        key: left[key][:rows] if left[key].dim() == 1 else torch.cat([left[key], right[key]], dim=1)[:rows, :width]
        for key in left
    }
    real = torch.arange(width) < torch.tensor(shape.lengths)[:, None]
    batch["token_mask"] = ((torch.rand(rows, width, generator=generator) < 0.7) & real).double()
    batch["sample_mask"] = (torch.rand(rows, generator=generator) < 0.8).double()
    return batch, case.make_output(generator, batch, vocab_size)

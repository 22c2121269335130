"""Datasets of single answers with a label: each answer is desirable or undesirable."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.datasets import PromptAnswerDataset
from rl_megatron.data.encoding import TooLong
from rl_megatron.data.labels import LABEL, check_labels
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer


class LabelledDataset(PromptAnswerDataset):
    """Prompts with one answer each, as in `PromptAnswerDataset`, and the labels of the answers.

    Attributes:
        num_desirable: How many answers are desirable.

    Raises:
        ValueError: A record has no label, or one that is neither true nor false; or see `PromptAnswerDataset`.
    """

    def __init__(
        self, records: Sequence[Record], renderer: Renderer, max_sequence_length: int, *, too_long: TooLong = "error"
    ) -> None:
        check_labels(records)
        super().__init__(records, renderer, max_sequence_length, too_long=too_long)
        self._desirable = torch.tensor([float(each.record.values[LABEL]) for each in self._sequences])
        self.num_desirable = int(self._desirable.sum())

    def batch(self, indices: Sequence[int]) -> BatchedDataDict:
        """Return the sequences with these indices, with `desirable` [B] fp32: 1 if the label is true, otherwise 0."""
        batch = super().batch(indices)
        batch["desirable"] = self._desirable[list(indices)]
        return batch

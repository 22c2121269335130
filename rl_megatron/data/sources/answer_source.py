"""`AnswerSource`: a data source of prompts with one answer each, read from files or from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rl_megatron.data.plain_text import plain_texts
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import check_texts
from rl_megatron.data.sources.record_source import RecordSource
from rl_megatron.data.sources.source import ConfigT, HeldoutBatch, heldout_part, num_evaluated
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset, PromptAnswerDataset


class AnswerSource(RecordSource[ConfigT]):
    """A data source of prompts with one answer each, which become one sequence each."""

    def check_records(self, records: Sequence[Record], tokenizer: Tokenizer | None) -> None:
        """Check that the records can be turned into tokens."""
        check_texts(records, self.data, tokenizer)

    def texts(self) -> Iterator[str]:
        """Yield the prompt with its answer of every training record."""
        yield from plain_texts(self.parts()[0], self.data)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the training records."""
        return self._dataset(self.parts()[0], tokenizer)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch:
        """Return the first held-out records."""
        answers = self._dataset(heldout_part(self.parts(), self.data), tokenizer)
        chosen = range(num_evaluated(self.data, len(answers)))
        return HeldoutBatch(answers.batch(chosen), locations=tuple(map(answers.location, chosen)))

    def _dataset(self, records: list[Record], tokenizer: Tokenizer) -> PromptAnswerDataset:
        return self._dataset_class()(
            records,
            self.renderer(tokenizer),
            self.stage.model.max_sequence_length,
            too_long=self.data.too_long,
        )

    def _dataset_class(self) -> type[PromptAnswerDataset]:
        from rl_megatron.data.datasets import PromptAnswerDataset  # here, because it imports torch

        return PromptAnswerDataset

"""The data source for records of prompts and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rl_megatron.config.data_sources import PromptAnswerConfig
from rl_megatron.data.plain_text import plain_texts
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import check_texts
from rl_megatron.data.sources.record_source import RecordSource
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import HeldoutBatch, heldout_part, num_evaluated
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset, PromptAnswerDataset


@register_source(PromptAnswerConfig)
class PromptAnswerSource(RecordSource[PromptAnswerConfig]):
    """The source of prompts with answers."""

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
        records = self._dataset(heldout_part(self.parts(), self.data), tokenizer)
        chosen = range(num_evaluated(self.data, len(records)))
        return HeldoutBatch(records.batch(chosen), locations=tuple(map(records.location, chosen)))

    def _dataset(self, records: list[Record], tokenizer: Tokenizer) -> PromptAnswerDataset:
        from rl_megatron.data.datasets import PromptAnswerDataset

        return PromptAnswerDataset(
            records,
            self.renderer(tokenizer),
            self.stage.model.max_sequence_length,
            too_long=self.data.too_long,
        )

"""The data source for records of prompts and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rl_megatron.config.data_sources import PromptAnswerConfig
from rl_megatron.data.records import Record
from rl_megatron.data.sources.record_source import RecordSource
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import HeldoutBatch, heldout_part
from rl_megatron.data.templates import require_fields
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset, PromptAnswerDataset


@register_source(PromptAnswerConfig)
class PromptAnswerSource(RecordSource[PromptAnswerConfig]):
    """The source of prompts with answers."""

    def check_records(self, records: Sequence[Record]) -> None:
        """Check that both templates find their fields in the records."""
        require_fields(records, self.data.prompt_template)
        require_fields(records, self.data.answer_template)

    def texts(self) -> Iterator[str]:
        """Yield the prompt with its answer of every training record."""
        data, records = self.data, self.parts()[0]
        require_fields(records, data.prompt_template)
        require_fields(records, data.answer_template)
        for record in records:
            yield data.prompt_template.format(**record.values) + data.answer_template.format(**record.values)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the training records."""
        return self._dataset(self.parts()[0], tokenizer)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch:
        """Return the first held-out records."""
        records = self._dataset(heldout_part(self.parts(), self.data), tokenizer)
        return HeldoutBatch(records.batch(range(min(len(records), self.data.num_eval_examples))))

    def _dataset(self, records: list[Record], tokenizer: Tokenizer) -> PromptAnswerDataset:
        from rl_megatron.data.datasets import PromptAnswerDataset

        return PromptAnswerDataset(
            records,
            tokenizer,
            self.stage.model.max_sequence_length,
            prompt_template=self.data.prompt_template,
            answer_template=self.data.answer_template,
            too_long=self.data.too_long,
        )

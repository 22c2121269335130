"""The data source for JSONL of preference pairs. A held-out prompt is held out with all its pairs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.data_sources import PreferenceConfig
from rl_megatron.data.files import Record
from rl_megatron.data.preference_files import answer_records, load_preferences
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import DataSource, HeldoutBatch, heldout_part, required_path
from rl_megatron.data.templates import require_fields
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset
    from rl_megatron.data.preferences import PreferenceDataset


@register_source(PreferenceConfig)
class PreferenceSource(DataSource[PreferenceConfig]):
    """The source of preference pairs, which are given as pairs or formed from graded solutions."""

    def check_files(self, tokenizer: Tokenizer | None) -> None:
        """Check the records, and that both templates find their fields in them."""
        data = self.data
        for records in load_preferences(required_path(data), 0.0, data.prompt_template):  # a split would need torch
            require_fields(records, data.prompt_template)
            for record in records:
                require_fields(answer_records(record), data.answer_template)

    def texts(self) -> Iterator[str]:
        """Yield the prompt and both answers of every training pair."""
        data, records = self.data, self._parts()[0]
        require_fields(records, data.prompt_template)
        for record in records:
            sides = answer_records(record)
            require_fields(sides, data.answer_template)
            yield data.prompt_template.format(**record.values)
            yield from (data.answer_template.format(**side.values) for side in sides)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the training pairs."""
        return self._dataset(self._parts()[0], tokenizer)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch:
        """Return the first held-out pairs in the order of the data, two sequences each."""
        pairs = self._dataset(heldout_part(self._parts(), self.data), tokenizer)
        return HeldoutBatch(pairs.batch(range(min(len(pairs), self.data.num_eval_examples // 2))))

    def _parts(self) -> tuple[list[Record], list[Record]]:
        data = self.data
        return load_preferences(required_path(data), data.heldout_fraction, data.prompt_template)

    def _dataset(self, records: list[Record], tokenizer: Tokenizer) -> PreferenceDataset:
        from rl_megatron.data.preferences import PreferenceDataset

        return PreferenceDataset(
            records,
            tokenizer,
            self.stage.model.max_sequence_length,
            prompt_template=self.data.prompt_template,
            answer_template=self.data.answer_template,
            too_long=self.data.too_long,
        )

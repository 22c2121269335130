"""The data source for answers with labels. A held-out prompt is held out with all its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rl_megatron.config.data_sources import LabelledConfig
from rl_megatron.data.labels import check_labels
from rl_megatron.data.plain_text import plain_texts
from rl_megatron.data.preference_files import split_by_prompt
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import check_texts
from rl_megatron.data.sources.record_source import RecordSource
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import HeldoutBatch, heldout_part, num_evaluated
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset
    from rl_megatron.data.labelled import LabelledDataset


@register_source(LabelledConfig)
class LabelledSource(RecordSource[LabelledConfig]):
    """The source of answers that are labelled desirable or undesirable."""

    def check_records(self, records: Sequence[Record], tokenizer: Tokenizer | None) -> None:
        """Check that the records have labels, and that they can be turned into tokens."""
        check_labels(records)
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

    def split(self, train: list[Record], heldout: list[Record] | None) -> tuple[list[Record], list[Record]]:
        """Return the (training, held-out) records. All answers to a prompt are on the same side."""
        if heldout is not None:
            return train, heldout
        return split_by_prompt(train, self.data.heldout_fraction, self.data.prompt_template)

    def _dataset(self, records: list[Record], tokenizer: Tokenizer) -> LabelledDataset:
        from rl_megatron.data.labelled import LabelledDataset

        return LabelledDataset(
            records,
            self.renderer(tokenizer),
            self.stage.model.max_sequence_length,
            too_long=self.data.too_long,
        )

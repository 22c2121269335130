"""The data sources for answers: prompts with one answer, answers with labels, and pairs of answers.

If a prompt is held out, all its labelled answers or pairs are held out too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rl_megatron.config.data_sources import LabelledConfig, PreferenceConfig, PromptAnswerConfig
from rl_megatron.data.answers import SINGLE_FILES, build_pairs, check_labels
from rl_megatron.data.plain_text import write_texts
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import check_texts
from rl_megatron.data.sources.record_source import RecordSource
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import ConfigT, HeldoutBatch, count_evaluated, require_heldout
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset, LabelledDataset, PreferenceDataset, PromptAnswerDataset


class AnswerSource(RecordSource[ConfigT]):
    """A data source of prompts with one answer each. A prompt and its answer become one sequence."""

    def check_records(self, records: Sequence[Record], tokenizer: Tokenizer | None) -> None:
        """Check that the records can be turned into tokens."""
        check_texts(records, self.data, tokenizer)

    def texts(self) -> Iterator[str]:
        """Yield prompt and answer of every training record as one text."""
        yield from write_texts(self.parts()[0], self.data)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the training records."""
        return self._build_dataset(self.parts()[0], tokenizer)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch:
        """Return the first held-out records."""
        answers = self._build_dataset(require_heldout(self.parts(), self.data), tokenizer)
        indices = range(count_evaluated(self.data, len(answers)))
        return HeldoutBatch(answers.batch(indices), locations=tuple(map(answers.location, indices)))

    def _build_dataset(self, records: list[Record], tokenizer: Tokenizer) -> PromptAnswerDataset:
        return self._dataset_class()(
            records,
            self.renderer(tokenizer),
            self.stage.model.max_sequence_length,
            too_long=self.data.too_long,
        )

    def _dataset_class(self) -> type[PromptAnswerDataset]:
        from rl_megatron.data.datasets import PromptAnswerDataset  # here, because it imports torch

        return PromptAnswerDataset


@register_source(PromptAnswerConfig)
class PromptAnswerSource(AnswerSource[PromptAnswerConfig]):
    """The source of prompts with answers."""


@register_source(LabelledConfig)
class LabelledSource(AnswerSource[LabelledConfig]):
    """The source of answers that are labelled desirable or undesirable."""

    def check_records(self, records: Sequence[Record], tokenizer: Tokenizer | None) -> None:
        """Check that the records have labels, and that they can be turned into tokens."""
        check_labels(records)
        super().check_records(records, tokenizer)

    def split(self, train: list[Record], heldout: list[Record] | None) -> tuple[list[Record], list[Record]]:
        """Return the (training, held-out) records. All answers to a prompt are in the same part."""
        if heldout is not None:
            return train, heldout
        return self.split_by_prompt(train)

    def _dataset_class(self) -> type[LabelledDataset]:
        from rl_megatron.data.datasets import LabelledDataset  # here, because it imports torch

        return LabelledDataset


@register_source(PreferenceConfig)
class PreferenceSource(RecordSource[PreferenceConfig]):
    """The source of preference pairs, which are given as pairs or formed from graded solutions."""

    alone = SINGLE_FILES

    def check_records(self, records: Sequence[Record], tokenizer: Tokenizer | None) -> None:
        """Check that the records form pairs, and that these can be turned into tokens."""
        check_texts(build_pairs(records), self.data, tokenizer, pairs=True)

    def texts(self) -> Iterator[str]:
        """Yield the prompt and both answers of every training pair."""
        yield from write_texts(self.parts()[0], self.data, pairs=True)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the training pairs."""
        return self._build_dataset(self.parts()[0], tokenizer)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch:
        """Return the first held-out pairs in the order of the data, two sequences each."""
        pairs = self._build_dataset(require_heldout(self.parts(), self.data), tokenizer)
        indices = range(count_evaluated(self.data, 2 * len(pairs)) // 2)
        return HeldoutBatch(pairs.batch(indices), locations=tuple(map(pairs.location, indices)))

    def prepare(self, records: list[Record]) -> list[Record]:
        """Return the pairs of the records."""
        return build_pairs(records)

    def split(self, train: list[Record], heldout: list[Record] | None) -> tuple[list[Record], list[Record]]:
        """Return the (training, held-out) pairs. All pairs of a prompt are in the same part."""
        if heldout is not None:
            return build_pairs(train), build_pairs(heldout)
        return self.split_by_prompt(build_pairs(train))

    @property
    def num_asked_for(self) -> int:
        """Return the number of pairs that evaluation asks for; a pair is two sequences."""
        return -(-super().num_asked_for // 2)

    def _build_dataset(self, records: list[Record], tokenizer: Tokenizer) -> PreferenceDataset:
        from rl_megatron.data.datasets import PreferenceDataset

        return PreferenceDataset(
            records,
            self.renderer(tokenizer),
            self.stage.model.max_sequence_length,
            too_long=self.data.too_long,
        )

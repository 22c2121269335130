"""The data source for answers with labels. A held-out prompt is held out with all its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_megatron.config.data_sources import LabelledConfig
from rl_megatron.data.labels import check_labels
from rl_megatron.data.preference_files import split_by_prompt
from rl_megatron.data.records import Record
from rl_megatron.data.sources.answer_source import AnswerSource
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.labelled import LabelledDataset


@register_source(LabelledConfig)
class LabelledSource(AnswerSource[LabelledConfig]):
    """The source of answers that are labelled desirable or undesirable."""

    def check_records(self, records: Sequence[Record], tokenizer: Tokenizer | None) -> None:
        """Check that the records have labels, and that they can be turned into tokens."""
        check_labels(records)
        super().check_records(records, tokenizer)

    def split(self, train: list[Record], heldout: list[Record] | None) -> tuple[list[Record], list[Record]]:
        """Return the (training, held-out) records. All answers to a prompt are on the same side."""
        if heldout is not None:
            return train, heldout
        return split_by_prompt(train, self.data.heldout_fraction, self.data.prompt_template, self.num_asked_for)

    def _dataset_class(self) -> type[LabelledDataset]:
        from rl_megatron.data.labelled import LabelledDataset  # here, because it imports torch

        return LabelledDataset

"""The data source for text: text files, or records with the field `text`."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rl_megatron.config.data_sources import TextConfig
from rl_megatron.data.files import find_files, is_plain_text, load_text, require_path
from rl_megatron.data.readers import TextLine, TextLines
from rl_megatron.data.records import Record
from rl_megatron.data.sources.record_source import RecordSource
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import HeldoutBatch, count_evaluated, require_heldout
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset, TextDataset


@register_source(TextConfig)
class TextSource(RecordSource[TextConfig]):
    """The source of documents, read as one stream of tokens in windows of `data.sequence_length`.

    A text file is one document, and so is the field `text` of each record.
    """

    plain = TextLines

    def check_records(self, records: Sequence[Record], tokenizer: Tokenizer | None) -> None:
        """Check that the records have a text."""
        build_documents(records)

    def texts(self) -> Iterator[str]:
        """Yield the lines of the training text."""
        for document in self.read_documents()[0]:
            yield from document.splitlines(keepends=True)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the windows of the training text."""
        return self._build_windows(self.read_documents()[0], tokenizer)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch:
        """Return the first windows of the held-out text."""
        windows = self._build_windows(require_heldout(self.read_documents(), self.data), tokenizer)
        # Streamed data holds out `num_eval_examples` records, which may give fewer windows.
        takes_all = self.data.streaming and len(windows) <= (self.data.num_eval_examples or 0)
        number = len(windows) if takes_all else count_evaluated(self.data, len(windows), "windows")
        batch = windows.batch(range(number))
        return HeldoutBatch(batch, windows.num_predicted_tokens / windows.num_characters)

    @property
    def num_asked_for(self) -> int:
        """Return 0, because evaluation asks for windows, and how many a record gives depends on its length."""
        return 0

    def _build_windows(self, documents: list[str], tokenizer: Tokenizer) -> TextDataset:
        from rl_megatron.data.datasets import TextDataset

        return TextDataset(documents, tokenizer, self.data.sequence_length, self.data.cache_dir)

    def read_documents(self) -> tuple[list[str], list[str]]:
        """Return the (training, held-out) documents."""
        data = self.data
        if data.dataset_name is None and not data.streaming:
            files = find_files(require_path(data), data.split, data.eval_path, data.eval_split)
            if all(map(is_plain_text, files.train + files.heldout)):
                fraction = 0.0 if files.heldout else data.heldout_fraction
                train = [load_text(file, fraction) for file in files.train]
                ends = [text for _, text in train if text]
                return [text for text, _ in train], ends + [load_text(file, 0.0)[0] for file in files.heldout]
        train, heldout = self.parts()
        return build_documents(train), build_documents(heldout)


def build_documents(records: Sequence[Record]) -> list[str]:
    """Return the documents of records: the field `text` of each. Consecutive lines of a text file are one document."""
    for record in records:
        if "text" not in record.values:
            fields = ", ".join(map(str, record.values)) or "none"
            name = next(iter(difflib.get_close_matches("text", record.values, n=1) or record.values), "content")
            raise ValueError(
                f"{record.location}: pretraining reads the field 'text', which the record does not have (its fields: "
                f"{fields}); name the field of the text, as in data.columns={{text: {name}}}, or choose an algorithm "
                "for this data, such as sft."
            )
    return ["".join(map(_read_text, lines)) for _, lines in itertools.groupby(records, _name_document)]


def _name_document(record: Record) -> str:
    """Return the name of a record's document: its file, or its own location if it is not a line of a text file."""
    return record.location.rpartition(":")[0] if isinstance(record, TextLine) else record.location


def _read_text(record: Record) -> str:
    text = record.values["text"]
    if not isinstance(text, str):
        raise ValueError(f"{record.location}: 'text' is a {type(text).__name__}; it must be a string.")
    return text

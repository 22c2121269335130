"""`RecordSource`: a data source that reads records from files or from the Hugging Face Hub."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import ClassVar, Self

from rl_megatron.config.schema import USUAL_EVAL_EXAMPLES, StageConfig
from rl_megatron.data.answers import split_by_prompt
from rl_megatron.data.files import find_parts, split_heldout
from rl_megatron.data.readers import JsonLines, Lines
from rl_megatron.data.records import Part, Reader, Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.sources.source import ConfigT, DataSource
from rl_megatron.data.tokenizer import Tokenizer

_CHECKED_EARLY = 10_000  # records per part that are checked before torch is imported; the preflight checks all


class RecordSource(DataSource[ConfigT]):
    """A data source whose training and held-out records come from the package's readers.

    Attributes:
        plain: The reader of files whose suffix is neither that of JSON lines nor that of Parquet.
        alone: Names of files. If a directory has any of them, only the first one is read.
    """

    plain: ClassVar[type[Lines]] = JsonLines
    alone: ClassVar[tuple[str, ...]] = ()

    def __init__(self, stage: StageConfig, data: ConfigT):
        super().__init__(stage, data)
        self._block: list[Record] | None = None
        self._renderers: list[Renderer] = []  # the renderer of all blocks

    def with_block(self, records: list[Record]) -> Self:
        """Return a copy of this source whose training data are these records. All copies share one renderer."""
        source = copy.copy(self)
        source._block = records
        return source

    def renderer(self, tokenizer: Tokenizer) -> Renderer:
        """Return a renderer of the data section. All blocks share one, so the first block decides its templates."""
        if self._block is None:
            return super().renderer(tokenizer)
        if not self._renderers:
            self._renderers.append(super().renderer(tokenizer))
        return self._renderers[0]

    def training_reader(self) -> Reader:
        """Return the reader of streamed training records. It skips the first ones if these are held out."""
        return Part(find_parts(self.data, self.plain, self.alone).train, skipped=self.num_left_out)

    @property
    def num_left_out(self) -> int:
        """Return how many of the first records are held out; 0 unless data is streamed and has no held-out part."""
        if not self.data.streaming or self._num_heldout == 0:
            return 0
        return self._num_heldout if find_parts(self.data, self.plain, self.alone).heldout is None else 0

    @property
    def num_held_out(self) -> int:
        """Return how many held-out records were taken from the training records."""
        if self.data.streaming:
            return self.num_left_out
        return len(self.parts()[1]) if find_parts(self.data, self.plain, self.alone).heldout is None else 0

    def check_files(self, tokenizer: Tokenizer | None) -> None:
        """Check the files, and the first records of each part."""
        readers = find_parts(self.data, self.plain, self.alone)
        for reader in (readers.train, readers.heldout):
            if reader is not None:
                self.check_records(Part(reader, limit=_CHECKED_EARLY).all(), tokenizer)

    def check_records(self, records: Sequence[Record], tokenizer: Tokenizer | None) -> None:
        """Check, without torch, that records have what the templates and the source need.

        `tokenizer` is None if it has yet to be trained.
        """

    def prepare(self, records: list[Record]) -> list[Record]:
        """Return the records to build a dataset from: by default, `records` themselves."""
        return records

    def parts(self) -> tuple[list[Record], list[Record]]:
        """Return the (training, held-out) records. For streamed data, training records are only the first block."""
        if self._block is not None:
            return self.prepare(self._block), []
        readers = find_parts(self.data, self.plain, self.alone)
        if not self.data.streaming:
            return self.split(readers.train.all(), None if readers.heldout is None else readers.heldout.all())
        train = Part(self.training_reader(), limit=self.data.shuffle_block).all()
        heldout_reader = Part(readers.heldout or readers.train, limit=self._num_heldout)
        heldout = [] if self._num_heldout == 0 else heldout_reader.all()
        return self.prepare(train), self.prepare(heldout) if heldout else []

    def first_record(self) -> Record:
        """Return the first record of the data."""
        return next(find_parts(self.data, self.plain, self.alone).train.read())[0]

    def split(self, train: list[Record], heldout: list[Record] | None) -> tuple[list[Record], list[Record]]:
        """Return the (training, held-out) records; if `heldout` is None, a fixed part of `train` is held out."""
        if heldout is not None:
            return train, heldout
        return split_heldout(train, self.data.heldout_fraction, self.num_asked_for, names=self._names())

    def split_by_prompt(self, train: list[Record]) -> tuple[list[Record], list[Record]]:
        """Return the (training, held-out) records of `train`. All records of a prompt are in the same part."""
        fraction, template = self.data.heldout_fraction, self.data.prompt_template
        return split_by_prompt(train, fraction, template, self.num_asked_for, self._names())

    @property
    def num_asked_for(self) -> int:
        """Return how many held-out records evaluation asks for, or 0 if `data.num_eval_examples` is not set."""
        return self.data.num_eval_examples or 0

    def _names(self) -> tuple[str, str]:
        """Return the names of the data and of the setting that holds records out, with its value, for messages."""
        name = find_parts(self.data, self.plain, self.alone).train.name
        return name, f"data.num_eval_examples={self.data.num_eval_examples}"

    @property
    def _num_heldout(self) -> int:
        """Return how many streamed records are held out: as many as evaluation uses, or 0 if heldout_fraction is 0."""
        return (self.data.num_eval_examples or USUAL_EVAL_EXAMPLES) if self.data.heldout_fraction > 0 else 0

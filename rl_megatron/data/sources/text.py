"""The data source for a text file, whose end is held out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_megatron.config.data_sources import TextConfig
from rl_megatron.data.files import load_text
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import DataSource, HeldoutBatch, heldout_part, required_path
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.datasets import Dataset, TextDataset


@register_source(TextConfig)
class TextSource(DataSource[TextConfig]):
    """The source of one file of plain text, read as a stream of tokens in windows of `data.sequence_length`."""

    def check_files(self, tokenizer: Tokenizer | None) -> None:
        """Check the file."""
        self._parts()

    def texts(self) -> Iterator[str]:
        """Yield the lines of the training text."""
        yield from self._parts()[0].splitlines(keepends=True)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the windows of the training text."""
        return self._dataset(self._parts()[0], tokenizer)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch:
        """Return the first windows of the held-out text."""
        windows = self._dataset(heldout_part(self._parts(), self.data), tokenizer)
        batch = windows.batch(range(min(len(windows), self.data.num_eval_examples)))
        return HeldoutBatch(batch, windows.num_predicted_tokens / windows.num_characters)

    def _parts(self) -> tuple[str, str]:
        return load_text(required_path(self.data), self.data.heldout_fraction)

    def _dataset(self, text: str, tokenizer: Tokenizer) -> TextDataset:
        from rl_megatron.data.datasets import TextDataset

        return TextDataset([text], tokenizer, self.data.sequence_length)

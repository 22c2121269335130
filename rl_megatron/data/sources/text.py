"""The data source for a text file, whose end is held out."""

from __future__ import annotations

from collections.abc import Iterator

from rl_megatron.config.data_sources import TextConfig
from rl_megatron.data.datasets import Dataset, TextDataset
from rl_megatron.data.files import load_text
from rl_megatron.data.sources.registry import register_source
from rl_megatron.data.sources.source import DataSource, HeldoutBatch, heldout_part, required_path
from rl_megatron.data.tokenizer import Tokenizer


@register_source(TextConfig)
class TextSource(DataSource[TextConfig]):
    """The source of one file of plain text, read as a stream of tokens in windows of `data.sequence_length`."""

    def texts(self) -> Iterator[str]:
        """Yield the lines of the training text."""
        yield from self._parts()[0].splitlines(keepends=True)

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the windows of the training text."""
        return TextDataset([self._parts()[0]], tokenizer, self.data.sequence_length)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch:
        """Return the first windows of the held-out text."""
        windows = TextDataset([heldout_part(self._parts(), self.data)], tokenizer, self.data.sequence_length)
        batch = windows.batch(range(min(len(windows), self.data.num_eval_examples)))
        return HeldoutBatch(batch, windows.num_predicted_tokens / windows.num_characters)

    def _parts(self) -> tuple[str, str]:
        return load_text(required_path(self.data), self.data.heldout_fraction)

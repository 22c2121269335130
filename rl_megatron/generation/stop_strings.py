"""Find stop strings, of any number of tokens, while the completion grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tokenizers import Tokenizer as Backend

# Extra tokens to decode before the last ones, in which a stop string may be: the first token may be decoded to half a
# character or without its space, and some tokens are decoded to nothing.
_MARGIN = 8


@dataclass(frozen=True)
class StopStrings:
    """Texts that end a completion, and the tokenizer that decodes it. Both are pickled for engines in other processes.

    A completion ends at the first token after which its text contains one of the texts. Special tokens are decoded too,
    so that a stop string may contain them.
    """

    texts: tuple[str, ...]  # none is empty
    definition: str = field(repr=False)  # the tokenizer, as the content of a `tokenizer.json`

    def appear_in(self, ids: Sequence[int]) -> bool:
        """Return whether the text of a completion contains one of the texts."""
        decoded = _backend(self.definition).decode(list(ids), skip_special_tokens=False)
        return any(text in decoded for text in self.texts)

    def ends(self, ids: Sequence[int]) -> bool:
        """Return whether the last token of a completion completes one of the texts."""
        tail = _backend(self.definition).decode(list(ids[-self._window :]), skip_special_tokens=False)
        return any(text in tail for text in self.texts) and self.appear_in(ids)

    @property
    def _window(self) -> int:
        return max(len(text.encode()) for text in self.texts) + _MARGIN


@lru_cache(maxsize=2)
def _backend(definition: str) -> Backend:
    return Backend.from_str(definition)

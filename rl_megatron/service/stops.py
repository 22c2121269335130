"""`StopRules`: how a client's stop settings end a completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.stop_strings import StopStrings

_MOST_STOPS, _LONGEST_STOP = 64, 256


@dataclass(frozen=True)
class StopRules:
    """The tokens that end a completion by default, and the tokenizer that finds texts.

    Attributes:
        end_ids: The tokens that end a completion if the client says nothing.
        definition: The tokenizer, as the content of a `tokenizer.json`.
    """

    end_ids: tuple[int, ...]
    definition: str

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> StopRules:
        return cls(() if tokenizer.eos_id is None else (tokenizer.eos_id,), tokenizer.definition)

    def choose(self, stop: str | Sequence[str] | Sequence[int] | None) -> tuple[tuple[int, ...], StopStrings | None]:
        """Return the token ids and the texts that end a completion.

        Without settings, the end token does. An empty list means that nothing does. A text ends a completion besides
        the end token; token ids do instead of it.

        Raises:
            ValueError: A text is empty or too long, or there are too many.
        """
        if stop is None:
            return self.end_ids, None
        stops = [stop] if isinstance(stop, str) else list(stop)
        if len(stops) > _MOST_STOPS:
            raise ValueError(f"sampling_params.stop has {len(stops)} entries; at most {_MOST_STOPS} are allowed")
        texts = [one for one in stops if isinstance(one, str)]
        if any(not 0 < len(text) <= _LONGEST_STOP for text in texts):
            raise ValueError(f"sampling_params.stop: a text must have 1 to {_LONGEST_STOP} characters")
        if texts:
            return self.end_ids, StopStrings(tuple(texts), self.definition)
        return tuple(one for one in stops if isinstance(one, int)), None

"""The reward function `format`: the completion consists of tagged parts, as in <think>…</think><answer>…</answer>."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from rl_megatron.rewards.registry import register_reward


@register_reward("format")
@dataclass(frozen=True)
class Format:
    """1 if the completion consists of the tagged parts, each once, in this order, otherwise 0.

    Only white space may be around them. No tag may occur within a part.

    Args:
        tags: The names of the tags. A prompt that ends in the first opening tag needs `opened=true`.
        opened: Whether the prompt has the first opening tag, so that the completion begins within the first part.
    """

    tags: tuple[str, ...] = ("think", "answer")
    opened: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tags, str) or not self.tags:
            raise ValueError(f"tags={self.tags!r} must be a list of names, such as [think, answer]")

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        names = "|".join(re.escape(tag) for tag in self.tags)
        inner = rf"(?:(?!</?(?:{names})>).)*"
        parts = [rf"<{re.escape(tag)}>{inner}</{re.escape(tag)}>" for tag in self.tags]
        if self.opened:
            parts[0] = parts[0].removeprefix(f"<{re.escape(self.tags[0])}>")
        return re.compile(r"\s*" + r"\s*".join(parts) + r"\s*", re.DOTALL)

    def __call__(self, completion: str) -> float:
        """Return the score of a completion."""
        return float(self._pattern.fullmatch(completion) is not None)

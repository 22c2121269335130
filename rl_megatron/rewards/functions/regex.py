"""The reward function `regex`: the completion matches a pattern, or has the reference answer where the pattern says."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from functools import cached_property

from rl_megatron.rewards.registry import register_reward

_GROUP = "answer"


@register_reward("regex")
@dataclass(frozen=True)
class Regex:
    """1 if a pattern is found in the completion, otherwise 0.

    If the pattern has a group `(?P<answer>…)`, the group of the last match must also be the reference answer, apart
    from white space.

    Args:
        pattern: A regular expression of Python's `re`. A dot also matches the end of a line.
        whole: Whether the whole completion must match.
    """

    pattern: str
    whole: bool = False

    def __post_init__(self) -> None:
        try:
            self._compiled  # noqa: B018  # a wrong pattern is found before the first step
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}") from error

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.DOTALL)

    def __call__(self, completion: str, answer: str) -> float:
        """Return the score of a completion."""
        if self.whole:
            match = self._compiled.fullmatch(completion)
        else:
            match = next(iter(deque(self._compiled.finditer(completion), maxlen=1)), None)
        if match is None or _GROUP not in self._compiled.groupindex:
            return float(match is not None)
        return float((match[_GROUP] or "").strip() == str(answer).strip())

"""The reward function `exact_match`: the completion is the reference answer."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.rewards.registry import register_reward


@register_reward("exact_match")
@dataclass(frozen=True)
class ExactMatch:
    """1 if the completion is the reference answer, apart from white space around both, otherwise 0.

    Args:
        ignore_case: Whether upper and lower case are the same.
    """

    ignore_case: bool = False

    def __call__(self, completion: str, answer: str) -> float:
        """Return the score of a completion."""
        given, wanted = completion.strip(), str(answer).strip()
        return float(given.casefold() == wanted.casefold() if self.ignore_case else given == wanted)

"""The reward function `overlong`: the soft punishment of long completions in DAPO.

Source: DAPO, arXiv:2503.14476, equation 13.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.rewards.registry import register_reward


@register_reward("overlong")
@dataclass(frozen=True)
class Overlong:
    """0 up to max_tokens − buffer_tokens, then falling linearly to −1 at max_tokens, and −1 beyond it.

    Args:
        max_tokens: The length at which the score is −1; usually `generation.max_new_tokens`.
        buffer_tokens: The number of tokens over which it falls.
    """

    max_tokens: int
    buffer_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise ValueError(f"buffer_tokens={self.buffer_tokens} must be from 1 to max_tokens={self.max_tokens}")

    def __call__(self, completion_ids: list[int]) -> float:
        """Return the score of a completion."""
        excess = len(completion_ids) - (self.max_tokens - self.buffer_tokens)
        return -min(max(excess, 0) / self.buffer_tokens, 1.0)

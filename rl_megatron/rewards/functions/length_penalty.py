"""The reward function `length_penalty`: every token costs the same."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.rewards.registry import register_reward


@register_reward("length_penalty")
@dataclass(frozen=True)
class LengthPenalty:
    """−(tokens − free_tokens) / max_tokens for a completion longer than free_tokens, otherwise 0.

    Args:
        max_tokens: The number of tokens that cost 1; usually `generation.max_new_tokens`.
        free_tokens: The number of tokens that cost nothing.
    """

    max_tokens: int
    free_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.free_tokens < 0:
            raise ValueError(
                f"max_tokens={self.max_tokens} must be at least 1, free_tokens={self.free_tokens} at least 0"
            )

    def __call__(self, completion_ids: list[int]) -> float:
        """Return the score of a completion."""
        return -max(len(completion_ids) - self.free_tokens, 0) / self.max_tokens

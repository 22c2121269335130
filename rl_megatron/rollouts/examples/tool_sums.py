"""The task of the experiment `calculator_tool`: sums for which a small model needs a calculator."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from rl_megatron.data.conversations import Message
from rl_megatron.data.tasks import Problem
from rl_megatron.rollouts.examples.conversations import GeneratedConversations


@dataclass(frozen=True)
class ToolSums(GeneratedConversations):
    """Problems such as `483+91+264`, whose answer is the sum.

    In some demonstrations, the assistant calls the tool `calculator` and repeats its result. In the others, the
    assistant answers at once.

    Args:
        num_terms: How many numbers are added.
        max_term: The largest of these numbers.
        share_of_calls: The share of demonstrations with a call.

    Raises:
        ValueError: `num_terms` or `max_term` is below 1, or the share is outside [0, 1].
    """

    name: ClassVar[str] = "tool_sums"

    num_terms: int = 3
    max_term: int = 999
    share_of_calls: float = 0.3

    def __post_init__(self) -> None:
        for key in ("num_terms", "max_term"):
            if getattr(self, key) < 1:
                raise ValueError(f"{self.name}: {key}={getattr(self, key)} must be at least 1")
        if not 0 <= self.share_of_calls <= 1:
            raise ValueError(f"{self.name}: share_of_calls={self.share_of_calls} must lie between 0 and 1")

    def draw(self, source: random.Random) -> Problem:
        terms = [source.randint(0, self.max_term) for _ in range(self.num_terms)]
        return Problem("+".join(map(str, terms)), str(sum(terms)))

    def conversation(self, problem: Problem, source: random.Random) -> list[Message]:
        """Return the sum and its answer; with probability `share_of_calls`, the calculator is called in between."""
        messages: list[Message] = [{"role": "user", "content": problem.prompt}]
        if source.random() < self.share_of_calls:
            messages.append({"role": "assistant", "content": f'[calculator(expression="{problem.prompt}")]'})
            messages.append({"role": "tool", "content": problem.answer})
        return [*messages, {"role": "assistant", "content": problem.answer}]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the last turn is the answer, otherwise 0.0."""
        return float(completion.strip() == problem.answer)

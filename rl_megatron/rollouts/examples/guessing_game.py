"""The experiment `guessing_game`: find a number with guesses that are answered by `higher` and `lower`."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rl_megatron.data.conversations import Message
from rl_megatron.data.tasks import Problem
from rl_megatron.rollouts.environment import EnvironmentStep
from rl_megatron.rollouts.examples.conversations import GeneratedConversations

_LARGEST = 99  # a number has two digits


@dataclass(frozen=True)
class GuessingTask(GeneratedConversations):
    """The problem `01-16`: find a number from 1 to 16. Problems differ in the number, which the prompt hides.

    The demonstrations guess at random. Only some of the guesses agree with the earlier answers.

    Args:
        num_numbers: The largest number.
        num_guesses: The guesses of a demonstration.
        share_of_right_guesses: The share of guesses that are chosen to agree with the earlier answers.

    Raises:
        ValueError: There are fewer than 2 numbers or more than 99, there is no guess, or the share is outside [0, 1].
    """

    name: ClassVar[str] = "guessing_game"
    has_one_prompt: ClassVar[bool] = True

    num_numbers: int = 16
    num_guesses: int = 4
    share_of_right_guesses: float = 0.4

    def __post_init__(self) -> None:
        if not 2 <= self.num_numbers <= _LARGEST:
            raise ValueError(f"{self.name}: num_numbers={self.num_numbers} must lie between 2 and {_LARGEST}")
        if self.num_guesses < 1:
            raise ValueError(f"{self.name}: num_guesses={self.num_guesses} must be at least 1")
        if not 0 <= self.share_of_right_guesses <= 1:
            share = self.share_of_right_guesses
            raise ValueError(f"{self.name}: share_of_right_guesses={share} must lie between 0 and 1")

    def draw(self, source: random.Random) -> Problem:
        number = source.randint(1, self.num_numbers)
        return Problem(f"01-{self.num_numbers:02}", f"{number:02}", {"number": number})

    def conversation(self, problem: Problem, source: random.Random) -> list[Message]:
        possible = range(1, self.num_numbers + 1)  # the numbers that agree with the answers so far
        game = GuessingGame()
        game.reset(problem.record)
        messages: list[Message] = [{"role": "user", "content": problem.prompt}]
        for number in range(self.num_guesses):
            is_right = source.random() < self.share_of_right_guesses
            guess = source.choice(possible) if is_right else source.randint(1, self.num_numbers)
            messages.append({"role": "assistant", "content": f"{guess:02}"})
            step = game.step(str(guess))
            if step.done or number == self.num_guesses - 1:
                break
            messages.append({"role": "user", "content": str(step.messages)})
            if step.messages == "higher":
                possible = range(max(possible.start, guess + 1), possible.stop)
            else:
                possible = range(possible.start, min(possible.stop, guess))
        return messages

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 0.0, because the game gives the reward."""
        return 0.0


class GuessingGame:
    """An environment that answers whether its number is higher or lower than a guess. The right guess gets reward 1."""

    def reset(self, record: Mapping[str, Any]) -> None:
        """Take the number of a problem. The prompt stays the first message."""
        self._number = int(record["number"])

    def step(self, answer: str) -> EnvironmentStep:
        guess = answer.strip()
        if re.fullmatch("[0-9]{1,4}", guess) is None:
            return EnvironmentStep("number")
        if int(guess) == self._number:
            return EnvironmentStep(reward=1.0, done=True)
        return EnvironmentStep("higher" if self._number > int(guess) else "lower")

"""`GeneratedConversations`: the base of tasks whose demonstrations are generated conversations."""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from rl_megatron.data.conversations import Message
from rl_megatron.data.tasks import Demonstration, Problem

_HELD_OUT = 10  # one in this many prompts is held out


class GeneratedConversations(ABC):
    """Generated problems with conversations that demonstrate them.

    A tenth of the prompts is held out. If all problems have the same prompt, held-out ones only have another seed.
    """

    name: ClassVar[str]
    has_one_prompt: ClassVar[bool] = False

    @abstractmethod
    def draw(self, source: random.Random) -> Problem:
        """Return a random problem."""

    @abstractmethod
    def conversation(self, problem: Problem, source: random.Random) -> list[Message]:
        """Return a conversation that begins with the problem's prompt."""

    @abstractmethod
    def reward(self, problem: Problem, completion: str) -> float:
        """Return the reward of the last turn, which is added to the rewards of an environment."""

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return `count` problems, drawn with replacement from all that are not held out.

        Raises:
            ValueError: `count` is None.
        """
        if count is None:
            raise ValueError(f"{self.name} generates its training problems: count must be a number")
        problems = self._draw_problems(f"train/{seed}", held_out=False)
        return [next(problems) for _ in range(count)]

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return `count` held-out problems, drawn with replacement.

        Raises:
            ValueError: `count` is None.
        """
        if count is None:
            raise ValueError(f"{self.name} generates its held-out problems: count must be a number")
        problems = self._draw_problems(f"heldout/{seed}", held_out=True)
        return [next(problems) for _ in range(count)]

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return conversations about the training problems for this `count` and `seed`."""
        source = random.Random(f"demonstrations/{seed}")
        shown = []
        for problem in self.train_problems(count, seed):
            messages = self.conversation(problem, source)
            shown.append(Demonstration(problem.prompt, problem.answer, {**problem.record, "messages": messages}))
        return shown

    def pretraining_documents(self, count: int, seed: int = 0) -> list[str]:
        """Return the texts of `count` conversations, from which the tokenizer learns the words of the task."""
        return [
            "\n".join(message["content"] for message in demonstration.record["messages"])
            for demonstration in self.demonstrations(count, seed)
        ]

    def _draw_problems(self, seed: str, held_out: bool) -> Iterator[Problem]:
        source = random.Random(seed)
        while True:
            problem = self.draw(source)
            if self.has_one_prompt or (zlib.crc32(problem.prompt.encode()) % _HELD_OUT == 0) == held_out:
                yield problem

"""What a task is: problems whose answers a program can check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable


@dataclass(frozen=True)
class Problem:
    """A prompt, its reference answer, and whatever else the task knows of it."""

    prompt: str
    answer: str
    record: Mapping[str, Any] = field(default_factory=dict)


class Demonstration(NamedTuple):
    """A prompt and the text that answers it, for supervised fine-tuning."""

    prompt: str
    answer: str


@runtime_checkable
class Task(Protocol):
    """A source of verifiable problems. Every method is deterministic: same task, same arguments, same result.

    `count=None` means all there are; a task that generates its training problems has no such number and raises.
    `register_task` sets `name`.
    """

    name: ClassVar[str]

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Problems to learn on; none of them is among the held-out ones."""
        ...

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Problems to evaluate on, all different; `seed` chooses which, where `count` is below their number."""
        ...

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Training problems with the text that answers them."""
        ...

    def reward(self, problem: Problem, completion: str) -> float:
        """How good `completion` is, in [0, 1]."""
        ...


@runtime_checkable
class GeneratedTask(Task, Protocol):
    """A task that can write as much text about itself as a model needs to be pretrained on it."""

    def pretraining_documents(self, count: int, seed: int = 0) -> list[str]:
        """Documents in the format of prompt and answer, made of training problems only."""
        ...

"""`Task`: the interface of tasks, whose problems have answers that a program can check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar, runtime_checkable

from rl_megatron.data.order import epoch_order
from rl_megatron.data.records import Record

ItemT = TypeVar("ItemT")


class TooFewProblems(ValueError):
    """The error of a task that has fewer problems than were asked for."""


@dataclass(frozen=True)
class TaskRecord(Record):
    """A record with the prompt and the answer of a task, which are used unless the data section has templates."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Problem:
    """A prompt with its reference answer.

    Attributes:
        prompt: The prompt.
        answer: The reference answer.
        record: Further fields, which the task's reward and prompt templates can use.
        location: Where the problem was read, as file:line, for messages.

    Raises:
        ValueError: The prompt is not a text.
    """

    prompt: str
    answer: str
    record: Mapping[str, Any] = field(default_factory=dict)
    location: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise ValueError(
                f"the prompt of a problem is a {type(self.prompt).__name__} ({self.prompt!r:.80}); it must be text: "
                "put messages in the field 'messages' of the problem's record, and a readable text in the prompt"
            )

    def as_record(self) -> TaskRecord:
        """Return the fields that templates can use: those of the record, and `prompt` and `answer`."""
        return _build_record(self.prompt, self.answer, self.record, self.location or f"problem {self.prompt[:60]!r}")


class Demonstration(NamedTuple):
    """A prompt and its answer for supervised fine-tuning, with `record` and `location` as in `Problem`."""

    prompt: str
    answer: str
    record: Mapping[str, Any] = MappingProxyType({})
    location: str = ""

    def as_record(self) -> TaskRecord:
        """Return the fields that templates can use: those of the record, and `prompt` and `answer`."""
        return _build_record(
            self.prompt, self.answer, self.record, self.location or f"demonstration {self.prompt[:60]!r}"
        )


def _build_record(prompt: str, answer: str, fields: Mapping[str, object], location: str) -> TaskRecord:
    return TaskRecord({"prompt": prompt, "answer": answer, **fields}, location, prompt, answer)


@runtime_checkable
class Task(Protocol):
    """A source of verifiable problems. Every method except `reward` is deterministic.

    `count=None` asks for all problems; a task that generates its training problems raises ValueError for it.
    `register_task` sets `name`.
    """

    name: ClassVar[str]

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return training problems, none of which is held out."""
        ...

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return problems to evaluate on, all different; `seed` chooses them if `count` is less than their number."""
        ...

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return the prompts of training problems with the texts that answer them."""
        ...

    def reward(self, problem: Problem, completion: str) -> float:
        """Return the reward of `completion`: a finite number, usually in [0, 1]."""
        ...


@runtime_checkable
class GeneratedTask(Task, Protocol):
    """A task that can also generate any amount of text to pretrain a model on."""

    def pretraining_documents(self, count: int, seed: int = 0) -> list[str]:
        """Return documents in the format of prompt and answer, made from training problems only."""
        ...


@runtime_checkable
class AnsweringTask(Task, Protocol):
    """A task that can also extract the answer of a completion, so that equal answers of samples can be counted."""

    def final_answer(self, completion: str) -> str | None:
        """Return the answer, normalized so that equal answers are equal strings, or None if the completion has none."""
        ...


def choose_items(items: Sequence[ItemT], count: int | None, seed: int, owner: str) -> list[ItemT]:
    """Return all items in their order, or `count` of them chosen by `seed`. Messages name their `owner`."""
    if count is None:
        return list(items)
    if count > len(items):
        raise TooFewProblems(f"{owner} has {len(items)} of these problems, and {count} were asked for: ask for fewer")
    return [items[index] for index in epoch_order(len(items), seed, epoch=0)[:count].tolist()]

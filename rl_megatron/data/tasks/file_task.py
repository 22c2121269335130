"""`FileTask`: the base of tasks whose problems are the records of local files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from rl_megatron.data.files import load_records
from rl_megatron.data.records import Record
from rl_megatron.data.tasks.task import Demonstration, Problem, choose_items


@dataclass(frozen=True)
class FileTask(ABC):
    """A task that reads its problems from files when one of its methods is first called; errors are raised then.

    Args:
        path: A directory with `train.jsonl` and `test.jsonl`, or one file of which `heldout_fraction` is held out.
        heldout_fraction: The share of problems that is held out, if `path` is a file.
    """

    name: ClassVar[str]

    path: str
    heldout_fraction: float = 0.05

    @abstractmethod
    def normalize(self, record: Record) -> Record:
        """Return a record with the fields that `problem` reads.

        Raises:
            ValueError: The record cannot be used; the message names file:line, the field and the remedy.
        """

    @abstractmethod
    def problem(self, record: Record) -> Problem:
        """Return the problem of a normalized record."""

    @abstractmethod
    def reward(self, problem: Problem, completion: str) -> float:
        """Return the reward of a completion."""

    def check_files(self) -> None:
        """Read the files and check every record. Held-out records are not chosen, because that needs torch."""
        for records in load_records(self.path, heldout_fraction=0.0):
            self._normalize_all(records)

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all training problems in the file's order, or `count` of them chosen by `seed`."""
        return [self.problem(record) for record in choose_items(self._splits[0], count, seed, self.name)]

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all held-out problems in the file's order, or `count` of them chosen by `seed`."""
        return [self.problem(record) for record in choose_items(self._splits[1], count, seed, self.name)]

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return the problems of `train_problems(count, seed)` with their answers."""
        problems = self.train_problems(count, seed)
        return [Demonstration(p.prompt, p.answer, p.record, p.location) for p in problems]

    def require(self, record: Record, fields: Iterable[tuple[str, str]]) -> None:
        """Check that a record has all `fields`, given as (the option that sets the field's name, the name)."""
        for option, name in fields:
            if name not in record.values:
                raise ValueError(
                    f"{record.location}: the record has no field {name!r} (its fields: "
                    f"{', '.join(map(str, record.values)) or 'none'}); set data.task.{option} to the right field."
                )

    @cached_property
    def _splits(self) -> tuple[list[Record], list[Record]]:
        train, heldout = load_records(self.path, self.heldout_fraction)
        return self._normalize_all(train), self._normalize_all(heldout)

    def _normalize_all(self, records: Iterable[Record]) -> list[Record]:
        return [self.normalize(record) for record in records]

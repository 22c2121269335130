"""The task `verifiers`: the examples of an environment of the library `verifiers`, which also gives the rewards."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from rl_megatron import disk
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.extras import check_interpreter
from rl_megatron.data.order import epoch_order
from rl_megatron.data.tasks.registry import register_task
from rl_megatron.data.tasks.task import Demonstration, Problem, TooFewProblems
from rl_megatron.workers.child_process import build_module_command, list_user_paths

EXAMPLE = "verifiers_example"  # the field of a record that the rollout worker gives back to the environment
_EXPORT = "rl_megatron.data.verifiers"
_SHOWN = 600  # characters of what a process printed last


@register_task("verifiers")
@dataclass(frozen=True)
class Verifiers:
    """The problems of an environment's dataset. The rollout worker `verifiers` gives each to the environment.

    Args:
        environment: What `rollout.environment.name` says.
        kwargs: What `rollout.environment.kwargs` says.
        python: What `rollout.environment.python` says.
        heldout_fraction: The share of examples that is held out if the environment has none for evaluation.
        max_examples: The most examples that are read of each dataset; None for all.

    Raises:
        ConfigError: The environment cannot be loaded.
        ValueError: It has too few examples.
    """

    name: ClassVar[str]

    environment: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    python: str | None = None
    heldout_fraction: float = 0.05
    max_examples: int | None = None

    def check_files(self) -> None:
        """Read the examples, without torch, which the split into two parts needs."""
        self._read()

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all training problems in their order, or `count` of them chosen by `seed`."""
        return self._chosen(self._examples()[0], count, seed)

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all held-out problems in their order, or `count` of them chosen by `seed`."""
        return self._chosen(self._examples()[1], count, seed)

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return the training problems with the answers of their examples."""
        problems = self.train_problems(count, seed)
        return [Demonstration(each.prompt, each.answer, each.record, each.location) for each in problems]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 0.0: the environment's own reward is the whole reward."""
        return 0.0

    def _examples(self) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """Return the problems to learn from, and those that are held out."""
        train, heldout = self._read()
        if not heldout:
            number = max(1, round(len(train) * self.heldout_fraction))
            held = set(epoch_order(len(train), 0, epoch=0)[:number].tolist())
            heldout = [problem for place, problem in enumerate(train) if place in held]
            train = [problem for place, problem in enumerate(train) if place not in held]
        if not train:
            raise ValueError(f"data.task.environment={self.environment} has no example to learn from")
        return train, heldout

    def _read(self) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """Return the problems of the environment's two datasets."""
        if not isinstance(self.environment, str):
            raise ConfigError(
                f"data.task.environment={self.environment!r} names no environment; set rollout.environment.name, "
                "which data=verifiers repeats here"
            )
        check_interpreter(self.python, "rollout.environment.python")
        given = json.dumps(dict(self.kwargs), sort_keys=True)
        return _exported(self.environment, given, self.python, self.max_examples)

    def _chosen(self, problems: Sequence[Problem], count: int | None, seed: int) -> list[Problem]:
        if count is None:
            return list(problems)
        if count > len(problems):
            raise TooFewProblems(
                f"{self.environment} has {len(problems)} of these problems, and {count} were asked for: ask for fewer"
            )
        return [problems[index] for index in epoch_order(len(problems), seed, epoch=0)[:count].tolist()]


@cache
def _exported(name: str, kwargs: str, python: str | None, limit: int | None) -> tuple[list[Problem], list[Problem]]:
    """Return the problems that a process in the environment's interpreter reads. This process asks once.

    Raises:
        ConfigError: The environment cannot be loaded.
    """
    asked = {"name": name, "kwargs": json.loads(kwargs), "limit": limit, "paths": list_user_paths()}
    with tempfile.TemporaryDirectory(prefix=disk.make_temporary_prefix("verifiers")) as scratch:
        file = Path(scratch) / "examples.json"
        command, environment = build_module_command(_EXPORT, python)
        done = subprocess.run(
            [*command, str(file), json.dumps(asked)], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if not file.is_file():
            said = " ".join(done.stdout.split())[-_SHOWN:]
            raise ConfigError(
                f"data.task.environment={name}: the process that reads its examples ended with status "
                f"{done.returncode}; its output ends: {said}"
            )
        found = json.loads(file.read_text(encoding="utf-8"))
    if "error" in found:
        raise ConfigError(found["error"])
    train, heldout = (
        [_problem(name, part, number, example) for number, example in enumerate(found[part])]
        for part in ("train", "heldout")
    )
    return train, heldout


def _problem(name: str, part: str, number: int, example: Mapping[str, Any]) -> Problem:
    prompt = example.get("prompt") or ""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    shown = "\n".join(str(message.get("content", "")) for message in messages)
    record = {"messages": messages, EXAMPLE: dict(example)}
    return Problem(shown, str(example.get("answer") or ""), record, f"{name}: {part} example {number}")

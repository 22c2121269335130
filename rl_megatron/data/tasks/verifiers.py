"""The task `verifiers`: examples of an environment of the library `verifiers`. The environment gives the rewards."""

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
from rl_megatron.data.tasks.task import Demonstration, Problem, choose_items
from rl_megatron.workers.child_process import build_module_command, list_user_paths

EXAMPLE = "verifiers_example"  # the field of a record that the rollout worker passes back to the environment
_EXPORT = "rl_megatron.data.verifiers"
_SHOWN = 600  # a message shows this many characters from the end of a failed process's output


@register_task("verifiers")
@dataclass(frozen=True)
class Verifiers:
    """The problems of an environment's dataset. The rollout worker `verifiers` passes each to the environment.

    Args:
        environment: The same as `rollout.environment.name`.
        kwargs: The same as `rollout.environment.kwargs`.
        python: The same as `rollout.environment.python`.
        heldout_fraction: The share of examples that is held out if the environment has none for evaluation.
        max_examples: The maximum number of examples that are read from each dataset; None reads all.

    Raises:
        ConfigError: The environment cannot be loaded.
        ValueError: The environment has too few examples.
    """

    name: ClassVar[str]

    environment: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    python: str | None = None
    heldout_fraction: float = 0.05
    max_examples: int | None = None

    def check_files(self) -> None:
        """Read the examples, without splitting off held-out ones, because choosing them needs torch."""
        self._read()

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all training problems in their order, or `count` of them chosen by `seed`."""
        return choose_items(self._split_examples()[0], count, seed, self.environment)

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all held-out problems in their order, or `count` of them chosen by `seed`."""
        return choose_items(self._split_examples()[1], count, seed, self.environment)

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return the training problems with the answers of their examples."""
        problems = self.train_problems(count, seed)
        return [Demonstration(p.prompt, p.answer, p.record, p.location) for p in problems]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 0.0: the environment's own reward is the whole reward."""
        return 0.0

    def _split_examples(self) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """Return the training problems and the held-out problems."""
        train, heldout = self._read()
        if not heldout:
            number = max(1, round(len(train) * self.heldout_fraction))
            held = set(epoch_order(len(train), 0, epoch=0)[:number].tolist())
            heldout = [problem for index, problem in enumerate(train) if index in held]
            train = [problem for index, problem in enumerate(train) if index not in held]
        if not train:
            raise ValueError(f"data.task.environment={self.environment} has no example to learn from")
        return train, heldout

    def _read(self) -> tuple[Sequence[Problem], Sequence[Problem]]:
        """Return the problems of the environment's two datasets."""
        if not isinstance(self.environment, str):
            raise ConfigError(
                f"data.task.environment={self.environment!r} names no environment; set rollout.environment.name, which "
                "data=verifiers copies to this key"
            )
        check_interpreter(self.python, "rollout.environment.python")
        kwargs = json.dumps(dict(self.kwargs), sort_keys=True)
        return _export(self.environment, kwargs, self.python, self.max_examples)


@cache
def _export(name: str, kwargs: str, python: str | None, limit: int | None) -> tuple[list[Problem], list[Problem]]:
    """Read both datasets in a process of the environment's Python, and return their problems. The result is cached."""
    request = {"name": name, "kwargs": json.loads(kwargs), "limit": limit, "paths": list_user_paths()}
    with tempfile.TemporaryDirectory(prefix=disk.make_temporary_prefix("verifiers")) as scratch:
        file = Path(scratch) / "examples.json"
        command, environment = build_module_command(_EXPORT, python)
        completed = subprocess.run(
            [*command, str(file), json.dumps(request)], env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        if not file.is_file():
            output = " ".join(completed.stdout.split())[-_SHOWN:]
            raise ConfigError(
                f"data.task.environment={name}: the process that reads its examples ended with status "
                f"{completed.returncode}; its output ends: {output}"
            )
        exported = json.loads(file.read_text(encoding="utf-8"))
    if "error" in exported:
        raise ConfigError(exported["error"])
    train, heldout = (
        [_build_problem(name, part, number, example) for number, example in enumerate(exported[part])]
        for part in ("train", "heldout")
    )
    return train, heldout


def _build_problem(name: str, part: str, number: int, example: Mapping[str, Any]) -> Problem:
    prompt = example.get("prompt") or ""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = "\n".join(str(message.get("content", "")) for message in messages)
    record = {"messages": messages, EXAMPLE: dict(example)}
    return Problem(text, str(example.get("answer") or ""), record, f"{name}: {part} example {number}")

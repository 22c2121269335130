"""`RolloutLog`: which groups every step of an asynchronous run has learned from, in what order, and how old they were.

The log is the file `log.jsonl` beside the files of rollouts, one JSON object per step. A step is written to it after
its file of rollouts and before it is learned from, and both are on the disk by then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rl_megatron import disk


@dataclass(frozen=True)
class LoggedGroup:
    """A group that a step learned from.

    Attributes:
        number: Its place in the stream of prompts.
        location: The place of its record in the data.
        ages: The age of each trajectory, in steps.
        versions: The oldest and the newest version of the weights that sampled its tokens; none if all failed.
    """

    number: int
    location: str
    ages: Sequence[int]
    versions: Sequence[int]


@dataclass(frozen=True)
class LoggedStep:
    """What is known of a step.

    Attributes:
        step: The step.
        used: The groups that it learned from, in the order of the batch.
        dropped: The groups that were dropped since the step before, with the reason.
        metrics: The metrics of its rollouts, which cannot be computed again.
    """

    step: int
    used: Sequence[LoggedGroup]
    dropped: Mapping[int, str]
    metrics: Mapping[str, float]

    @property
    def ended(self) -> list[int]:
        """Return the groups that will not be made again."""
        return [*(group.number for group in self.used), *self.dropped]


class RolloutLog:
    """The log of a stage. All ranks may read it, and rank 0 writes it."""

    def __init__(self, directory: Path):
        """Use the directory of the stage's files of rollouts; nothing is read or written yet."""
        self._path = directory / "log.jsonl"

    def read(self) -> dict[int, LoggedStep]:
        """Return the steps of the log. A last line without an end is that of a write that was cut off."""
        if not self._path.exists():
            return {}
        steps = {}
        for line in self._path.read_bytes().split(b"\n")[:-1]:
            found = json.loads(line)
            used = [LoggedGroup(**group) for group in found["used"]]
            dropped = {int(number): reason for number, reason in found["dropped"].items()}
            steps[found["step"]] = LoggedStep(found["step"], used, dropped, found["metrics"])
        return steps

    def append(self, step: LoggedStep) -> None:
        """Write a step.

        Raises:
            OSError: It cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = self._path.read_bytes().rpartition(b"\n") if self._path.exists() else (b"", b"", b"")
        with self._path.open("r+b" if self._path.exists() else "w+b") as file:
            file.truncate(len(whole[0]) + len(whole[1]))
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(asdict(step)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def forget(self, after: int) -> None:
        """Remove the steps after a step, to which the run has gone back. The file is replaced as a whole.

        Raises:
            OSError: It cannot be written.
        """
        kept = [step for number, step in self.read().items() if number <= after]
        if not self._path.exists():
            return
        disk.replace_file(self._path, "".join(json.dumps(asdict(step)) + "\n" for step in kept), is_synced=True)

"""Read the lines of metrics.jsonl that a resumed run finds, drop those of later steps, and detect changes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron import disk, log
from rl_megatron.config.metrics import METRICS_FILE


class RecordedMetrics:
    """The digest of metrics.jsonl, which a stage's checkpoints contain.

    Training does not need metrics, so a change of the file only causes a warning.
    """

    def __init__(self, output_dir: Path):
        self._path = output_dir / METRICS_FILE

    def state_dict(self) -> dict[str, Any]:
        """Return the file's size and digest on rank 0, which writes the file, and an empty state on other ranks."""
        if not log.is_main_rank() or not self._path.is_file():
            return {}
        content = self._path.read_bytes()
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Warn if the file no longer begins with the content that it had at the checkpoint."""
        if not state or not log.is_main_rank():
            return
        content = self._path.read_bytes()[: state["bytes"]] if self._path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != state["sha256"]:
            log.LOGGER.warning(
                "%s has changed since the checkpoint was saved; training continues and appends to the file",
                self._path,
            )


def read_metric_lines(path: Path) -> list[dict[str, Any]]:
    """Return the valid lines of metrics.jsonl or samples.jsonl, and warn of each invalid line.

    If any line is invalid, the file is copied to "<name>.damaged.jsonl". A truncated last line, which a killed run
    leaves, is skipped silently.
    """
    lines: list[dict[str, Any]] = []
    invalid: list[int] = []
    text = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(text, start=1):
        try:
            values = json.loads(line)
            if not {"stage", "step", "kind"} <= values.keys():
                raise ValueError
            lines.append(values)
        except (ValueError, AttributeError):
            if number < len(text) or line.endswith("}"):
                invalid.append(number)
    damaged = path.with_name(f"{path.stem}.damaged{path.suffix}")
    if invalid:
        shutil.copyfile(path, damaged)
    for number in invalid:
        log.LOGGER.warning(
            "%s:%d is not a line of metrics, and is left out; %s is a copy of the file as it was",
            *(path, number, damaged.name),
        )
    return lines


def drop_later_lines(path: Path, stage: str, start: int) -> None:
    """Drop from a JSON-lines file the lines of a stage after step `start`, and all lines that cannot be read."""
    if not path.exists():
        return
    lines = [line for line in read_metric_lines(path) if not _is_after(line, stage, start)]
    disk.replace_file(path, "".join(json.dumps(line) + "\n" for line in lines))


def _is_after(line: dict[str, Any], stage: str, step: int) -> bool:
    return line["stage"] == stage and (line["step"] > step or (step == 0 and line["step"] == 0))

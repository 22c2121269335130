"""`RecordedMetrics`: checkpoints know the lines of metrics.jsonl so far, and a resumed run says if they changed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron import log
from rl_megatron.config.metrics import METRICS_FILE


class RecordedMetrics:
    """A part of a stage's resumed state. Training does not need metrics, so a change of them is a warning only."""

    def __init__(self, output_dir: Path):
        """Keep the digest of metrics.jsonl in `output_dir`."""
        self._path = output_dir / METRICS_FILE

    def state_dict(self) -> dict[str, Any]:
        """Return the size and the digest of the file on rank 0, which writes it; nothing on other ranks."""
        if not log.is_main_rank() or not self._path.is_file():
            return {}
        content = self._path.read_bytes()
        return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Warn if the file no longer begins as it was."""
        if not state or not log.is_main_rank():
            return
        content = self._path.read_bytes()[: state["bytes"]] if self._path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != state["sha256"]:
            log.LOGGER.warning(
                "%s is not as it was when the checkpoint was saved; training goes on, and new lines are added to it",
                self._path,
            )


def readable_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl or samples.jsonl. If others are left out, a warning says so.

    The file as it was is then kept beside it, as metrics.damaged.jsonl.
    A last line without its end is what a killed run leaves, and is left out silently.
    """
    lines: list[dict[str, Any]] = []
    text = path.read_text(errors="replace").splitlines()
    for number, line in enumerate(text, start=1):
        try:
            values = json.loads(line)
            if not {"stage", "step", "kind"} <= values.keys():
                raise ValueError
            lines.append(values)
        except (ValueError, AttributeError):
            if number == len(text) and not line.endswith("}"):
                continue
            kept = path.with_name(f"{path.stem}.damaged{path.suffix}")
            shutil.copyfile(path, kept)
            log.LOGGER.warning(
                "%s:%d is not a line of metrics, and is left out; the file as it was is now %s", path, number, kept.name
            )
    return lines

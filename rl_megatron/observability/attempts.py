"""`attempts.jsonl`: the starts of a run, and how each of them ended. A start that was killed has no end."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime
from pathlib import Path

from rl_megatron import disk, log

ATTEMPTS = "attempts.jsonl"


class Attempts:
    """What writes the file, on rank 0. Nothing is written before `begin`."""

    def __init__(self, output_dir: Path):
        self._path = output_dir / ATTEMPTS
        self._has_begun = False

    def begin(self, layout: str) -> None:
        """Record that the run was started, with this layout in words."""
        self._has_begun = True
        self._append({"began": _now(), "host": socket.gethostname(), "layout": layout})

    def end(self, how: str, place: str = "") -> None:
        """Record how this start ended: "complete", "stopped" or "failed", and where in the run."""
        if self._has_begun:
            try:
                self._append({"ended": _now(), "how": how, "place": place})
            except OSError as error:  # a full disk must not hide why the run ended
                reason = disk.describe(error, self._path)
                log.LOGGER.warning("%s: the end of the run cannot be recorded: %s", self._path, reason)

    def _append(self, line: dict[str, str]) -> None:
        disk.append(self._path, (json.dumps(line) + "\n").encode())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def joined(lines: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return one entry for each start, from the lines of the file: when it began, and if it is known how it ended."""
    found: list[dict[str, str]] = []
    for line in lines:
        if "began" in line:
            found.append(dict(line))
        elif found:
            found[-1] |= line
    return found

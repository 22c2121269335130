"""The measured times of a step and of a save, which each node's first rank writes to a file for the launcher."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rl_megatron import disk, log

FILE = "RL_MEGATRON_STEP_TIMES"  # environment variable: the path of the file; unset if no launcher reads it


def write_step_times(step_seconds: float, save_seconds: float) -> None:
    """Write the longest times so far, on the first rank of each node; 0 stands for what has not been measured."""
    if FILE in os.environ and os.environ.get("LOCAL_RANK") == "0":
        path = Path(os.environ[FILE])
        try:
            disk.replace_file(path, json.dumps({"step_seconds": step_seconds, "save_seconds": save_seconds}))
        except OSError as error:
            log.once(f"the launcher is not told how long steps and saves take: {disk.describe(error, path)}")


def read_step_times() -> dict[str, float] | None:
    """Return `step_seconds` and `save_seconds`, or None if nothing has been measured yet."""
    path = Path(os.environ[FILE])
    return json.loads(path.read_text()) if path.is_file() else None

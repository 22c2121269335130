"""`failure.json`: why a run failed, or which rank hangs. One file in the run's directory, which is written at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron import disk

FAILURE = "failure.json"
PREVIOUS = "failure.previous.json"


class FailureFile:
    """The file of one run. Nothing is written before `begin`, because the directory may be another run's until then."""

    def __init__(self, output_dir: Path):
        self.path = output_dir / FAILURE
        self.has_begun = False

    def begin(self, is_writer: bool) -> None:
        """Let `write` write; if `is_writer`, keep the file of an earlier attempt under another name."""
        self.has_begun = True
        if is_writer and self.path.is_file():
            self.path.replace(self.path.with_name(PREVIOUS))

    def write(self, content: Mapping[str, Any], what: str) -> str:
        """Write the file. Return a sentence that says where `what` is, or why it is nowhere."""
        if not self.has_begun:
            return f"No file has {what}, because the run has not begun its output_dir"
        try:
            disk.replace_file(self.path, json.dumps(content, indent=1) + "\n")
        except OSError as error:  # a full disk must not hide the report
            return f"{self.path} could not be written ({disk.describe(error, self.path)})"
        return f"{self.path} has {what}"

"""A JSON-lines file of completions that a restarted command continues. This module needs no torch."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from rl_megatron import disk
from rl_megatron.config.errors import ConfigError

SETTINGS_SUFFIX = ".settings.json"
# The number of completions that are generated together and then written. Random numbers depend on it.
COMPLETIONS_PER_BLOCK = 1024
_BYTES_READ = 1 << 20


class CompletionsFile:
    """A file with one line for each completion, in order, and a second file with the settings of the completions.

    A command with other settings refuses to continue the file.
    """

    def __init__(self, path: Path, settings: Mapping[str, object]):
        """Keep the path, and the settings on which the completions depend, as JSON values."""
        self.path = path
        self.settings_path = path.with_name(path.name + SETTINGS_SUFFIX)
        self._settings = json.loads(json.dumps(settings))
        self._file: IO[bytes] | None = None

    def count_lines(self) -> int:
        """Return how many complete lines the file has; 0 if there is no file.

        Raises:
            ConfigError: The file cannot be written, was made with other settings, or has no readable settings file.
        """
        check_output(self.path)
        if not self.path.exists():
            return 0
        self._refuse_other_settings()
        with self.path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BYTES_READ), b""))

    def open(self) -> int:
        """Open the file after its last complete line, and return how many lines it has.

        An incomplete line at its end, which a killed command may leave, is removed.

        Raises:
            ConfigError: As in `count_lines`, or because another process writes to the file.
            OSError: The file cannot be written.
        """
        num_lines = self.count_lines()
        if not self.path.exists():
            self._write_settings()
        self._file = self.path.open("ab+")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--output {self.path}: another process writes to it; choose another file") from error
        self._file.truncate(_find_end_of_lines(self._file))
        return num_lines

    def append(self, lines: Iterable[Mapping[str, object]]) -> None:
        """Write lines, and sync them to the disk."""
        assert self._file is not None  # `open` was called
        self._file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """Return the complete lines of the file."""
        with self.path.open(encoding="utf-8", newline="\n") as file:  # a text may contain other line separators
            return [json.loads(line) for line in file]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_settings(self) -> None:
        disk.replace_file(self.settings_path, json.dumps(self._settings, indent=1) + "\n")

    def _refuse_other_settings(self) -> None:
        try:
            earlier = json.loads(self.settings_path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--output {self.path} exists, and {self.settings_path.name} beside it cannot be read, so the "
                "settings of its completions are not known; choose another file, or delete it"
            ) from error
        changed = [key for key in self._settings if earlier.get(key) != self._settings[key]]
        if changed:
            key = changed[0]
            raise ConfigError(
                f"--output {self.path} has completions of other settings ({key}: {earlier.get(key)} → "
                f"{self._settings[key]}); choose another file, delete it to start over, or repeat the settings of "
                f"{self.settings_path.name} to continue"
            )


def check_output(path: Path) -> None:
    """Raise ConfigError if a file cannot be written."""
    directory = path.absolute().parent
    if path.is_dir() or not directory.is_dir():
        why = "is a directory" if path.is_dir() else "lies in a directory that does not exist"
        raise ConfigError(f"--output {path} {why}; give the path of a file")
    if not os.access(path if path.exists() else directory, os.W_OK):
        raise ConfigError(f"--output {path} cannot be written: permission denied; choose another file")


def _find_end_of_lines(file: IO[bytes]) -> int:
    """Return the offset just after a file's last line break, or 0 if there is no line break."""
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _BYTES_READ)
        file.seek(start)
        line_break = file.read(end - start).rfind(b"\n")
        if line_break >= 0:
            return start + line_break + 1
        end = start
    return 0

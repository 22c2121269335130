"""Scratch copies of the repository's tracked files, which mutants and marks are written into."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "rl_megatron"


class Copy:
    """A directory with the tracked files of a repository, and its environment."""

    def __init__(self, directory: Path, repository: Path = REPOSITORY) -> None:
        """Copy the files; an earlier copy in the directory is deleted."""
        self.root = directory
        shutil.rmtree(directory, ignore_errors=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=repository, stdout=subprocess.PIPE, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (repository / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(repository / name, directory / name)
        environment = self.root / ".venv"
        if not environment.exists() and (repository / ".venv").exists():
            environment.symlink_to((repository / ".venv").resolve())
        self._written_at = int(time.time())  # that of the last file, at most

    @property
    def package(self) -> Path:
        """The directory of the package."""
        return self.root / PACKAGE

    def write(self, file: str, data: bytes) -> None:
        """Write a file of the package with a later time than any before, so that no bytecode of another text fits."""
        path, self._written_at = self.package / file, max(self._written_at + 1, int(time.time()))
        path.write_bytes(data)
        os.utime(path, (self._written_at, self._written_at))

    @contextmanager
    def changed(self, file: str, data: bytes) -> Iterator[None]:
        """Replace a file of the package within the block."""
        path = self.package / file
        original = path.read_bytes()
        self.write(file, data)
        try:
            yield
        finally:
            self.write(file, original)

"""Scratch copies of the repository's tracked files, which mutants and marks are written into."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "rl_megatron"
_OLD = 1_000_000_000  # the time of the files of a copy; every later write has a time of its own


class Copy:
    """A directory with the tracked files of a repository, and its environment."""

    def __init__(self, directory: Path, repository: Path = REPOSITORY) -> None:
        """Copy the files; an earlier copy in the directory is deleted."""
        self.root = directory
        self._times = count(_OLD + 1)
        shutil.rmtree(directory, ignore_errors=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=repository, stdout=subprocess.PIPE, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (repository / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(repository / name, directory / name)
        for path in self.root.glob(f"{PACKAGE}/**/*.py"):
            os.utime(path, (_OLD, _OLD))
        environment = self.root / ".venv"
        if not environment.exists() and (repository / ".venv").exists():
            environment.symlink_to((repository / ".venv").resolve())

    @property
    def package(self) -> Path:
        """The directory of the package."""
        return self.root / PACKAGE

    def write(self, file: str, data: bytes) -> None:
        """Write a file of the package, with a new time, so that no bytecode of another text fits it."""
        path, time = self.package / file, next(self._times)
        path.write_bytes(data)
        os.utime(path, (time, time))

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

"""`OutputLock`: the exclusive use of an output directory, so that two runs never write to the same one."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from rl_megatron import log
from rl_megatron.config.errors import ConfigError

_LOCK = ".lock"  # it names the process that uses the directory
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL)


class OutputLock:
    """A lock on an output directory, which rank 0 holds during its run.

    The operating system releases it however the process ends, and child processes do not inherit it.
    """

    def __init__(self, output_dir: Path):
        self._path = output_dir / _LOCK
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Lock the directory if it exists. If it has replaced a directory that this process locked, lock the new one.

        If another run holds the lock, a ConfigError names that run's process.
        """
        if not self._path.parent.is_dir() or (self._file is not None and self._is_current(self._file)):
            return
        self._close()
        file = self._path.open("a+")
        while not self._try_to_lock(file) or not self._is_current(file):  # its owner may just have removed the file
            file.close()
            file = self._path.open("a+")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file = file

    def release(self) -> None:
        if self._file is not None and self._is_current(self._file):
            self._path.unlink()
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _try_to_lock(self, file: IO[str]) -> bool:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                log.once(f"{self._path}: this file system has no locks, so a second run here is not noticed")
                return True
            if not self._is_current(file):
                return False
            file.seek(0)
            owner = file.read() or "another process"
            file.close()
            raise ConfigError(
                f"output_dir={self._path.parent} is in use by another run ({owner}); wait until that run ends, or set "
                "another output_dir"
            ) from error
        return True

    def _is_current(self, file: IO[str]) -> bool:
        """Return whether the open file is still the lock file in the directory."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

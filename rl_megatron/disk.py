"""Write files on a disk that may be full: atomically, or later when it has space. Errors name the free space."""

from __future__ import annotations

import errno
import glob
import io
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from rl_megatron import log

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNFINISHED = ".incomplete"  # the suffix of a file that is still being written; the process ID precedes it
_UNFINISHED_NAME = re.compile(r"\.\d+\.incomplete$")


def replace_file(path: Path, content: str | bytes, is_synced: bool = False) -> None:
    """Replace a file atomically: even if this process is killed, the file has its old or its whole new content.

    With `is_synced`, the new content is flushed to the disk before it replaces the old, so this holds even if the
    machine crashes. If an OSError is raised, nothing of the new content is left.
    """
    # Several processes may write the same file, such as report.html.
    partial = path.with_name(f"{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def append(path: Path, content: bytes) -> None:
    """Write to the end of a file, all or nothing: if an OSError is raised, the file is unchanged.

    No other process may write to the file.
    """
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError:
        with suppress(OSError):  # a part of the content may have been written
            os.truncate(path, size)
        raise


def sync_directory(path: Path) -> None:
    """Wait until the names of a directory's files are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(directory: Path) -> None:
    """Remove the files that killed processes were writing to a directory with `replace_file`.

    No process may be writing to the directory. Files that cannot be removed stay.
    """
    for path in directory.glob(f"*{_UNFINISHED}"):
        if _UNFINISHED_NAME.search(path.name):
            with suppress(OSError):
                path.unlink()


def make_temporary_prefix(what: str, parent: Path | None = None) -> str:
    """Return a name prefix for temporary directories of this process; `what` is their purpose, in one word.

    The first call for a purpose removes directories of this kind that ended processes of this machine have left in
    `parent`, by default the system's temporary directory.
    """
    namespace = Path("/proc/self/ns/pid")  # processes of another namespace cannot be seen here
    kind = f"rl-megatron-{what}-{socket.gethostname()}-{namespace.stat().st_ino if namespace.exists() else 0}-"
    _remove_stale_directories(Path(parent or tempfile.gettempdir()), kind)
    return f"{kind}{os.getpid()}-"


@cache
def _remove_stale_directories(parent: Path, kind: str) -> None:
    for directory in parent.glob(f"{glob.escape(kind)}*"):
        process = directory.name.removeprefix(kind).partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(directory, ignore_errors=True)


def find_system_error(error: BaseException) -> OSError | None:
    """Return the operating system's error that caused `error`, or None if none did.

    Torch reports a full disk as an unexpected file position, and the real error is only among the causes.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


def is_full(error: BaseException) -> bool:
    """Return whether a full disk, an exceeded quota or a file size limit caused the error."""
    cause = find_system_error(error)
    return cause is not None and cause.errno in _FULL


def describe(error: BaseException, path: Path) -> str:
    """Describe an error that occurred while writing below `path`, with the free space of its file system."""
    cause = find_system_error(error) or error
    return f"{type(cause).__name__}: {cause}; {describe_space(path)}"


def describe_space(path: Path) -> str:
    """Return in words how many bytes are free on the file system of a path, which need not exist yet."""
    try:
        disk = shutil.disk_usage(next(parent for parent in (path, *path.absolute().parents) if parent.exists()))
    except OSError:  # the file system itself may be gone
        return "its file system does not answer"
    return f"{disk.free:,} bytes free of {disk.total:,} on its file system"


def keep_printing() -> None:
    """Let stdout and stderr drop output instead of raising, if they are files on a full disk."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.flush()
            raw = io.BufferedWriter(_LossyFile(stream.fileno(), "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


class _LossyFile(io.FileIO):
    """A file that drops bytes for which a full disk has no space."""

    def write(self, content: ReadableBuffer, /) -> int:
        """Write some bytes, or drop them. Return their number."""
        try:
            return super().write(content) or 0
        except OSError as error:
            if not is_full(error):
                raise
            return memoryview(content).nbytes


class WaitingWrites:
    """The writes that failed because the disk was full. They wait in memory, in order, and one warning reports them.

    They are lost if the process is killed. Warnings name `directory`, which is on that disk.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._waiting: dict[str, deque[Callable[[], object]]] = {}
        self._has_warned = False

    def write(self, queue: str, write: Callable[[], object]) -> None:
        """Call `write` after the writes that wait in the same queue. While the disk is full, `write` waits, too.

        An OSError with another cause is raised.
        """
        self._waiting.setdefault(queue, deque()).append(write)
        try:
            self.finish()
        except OSError as error:
            if not is_full(error):
                raise
            if not self._has_warned:
                self._has_warned = True
                log.LOGGER.warning(
                    "%s: metrics and samples cannot be written (%s); training continues, and they wait in memory; "
                    "free disk space",
                    *(self._directory, describe(error, self._directory)),
                )

    def finish(self) -> None:
        """Call the waiting writes, and raise their first OSError. While the disk is full, failed writes stay queued."""
        first_error = None
        for waiting in self._waiting.values():
            try:
                while waiting:
                    try:
                        waiting[0]()
                    except BaseException as error:
                        if not is_full(error):
                            waiting.popleft()  # it would always fail
                        raise
                    waiting.popleft()
            except OSError as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        if self._has_warned:
            self._has_warned = False
            log.LOGGER.warning("%s: all metrics and samples are written again", self._directory)

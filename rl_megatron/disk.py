"""Write files on a disk that may be full: whole or not at all, now or later, and with words that say what to do."""

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
_UNFINISHED = ".incomplete"  # the suffix of a file that is being written, after the number of the process
_OF_A_PROCESS = re.compile(r"\.\d+\.incomplete$")


def replace_file(path: Path, content: str | bytes, is_synced: bool = False) -> None:
    """Write a file so that it has its old content or all of the new, also if this process is killed meanwhile.

    With `is_synced`, it is on the disk on return, so that it survives a crash of the machine.

    Raises:
        OSError: It cannot be written. Nothing of the new content is left.
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
    """Write to the end of a file, all or nothing. No other process may write to it.

    Raises:
        OSError: It cannot be written. The file is as it was.
    """
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError:
        with suppress(OSError):  # without this, a part of the content may be there
            os.truncate(path, before)
        raise


def remove_unfinished(directory: Path) -> None:
    """Remove the files that `replace_file` was writing in a directory in processes that were killed.

    No process may write there. What cannot be removed stays.
    """
    for path in directory.glob(f"*{_UNFINISHED}"):
        if _OF_A_PROCESS.search(path.name):
            with suppress(OSError):
                path.unlink()


def prefix_of_process(what: str, parent: Path | None = None) -> str:
    """Return how the name of a temporary directory of this process begins.

    The first call in a process removes the directories of this kind that ended processes of this machine have left.

    Args:
        what: What it is for, in one word.
        parent: Where the directory will be. None: the system's directory for temporary files.
    """
    namespace = Path("/proc/self/ns/pid")  # of another one, processes here know nothing
    kind = f"rl-megatron-{what}-{socket.gethostname()}-{namespace.stat().st_ino if namespace.exists() else 0}-"
    _remove_of_ended_processes(Path(parent or tempfile.gettempdir()), kind)
    return f"{kind}{os.getpid()}-"


@cache
def _remove_of_ended_processes(parent: Path, kind: str) -> None:
    for directory in parent.glob(f"{glob.escape(kind)}*"):
        process = directory.name.removeprefix(kind).partition("-")[0]
        if process.isdigit() and not psutil.pid_exists(int(process)):
            shutil.rmtree(directory, ignore_errors=True)


def find_system_error(error: BaseException) -> OSError | None:
    """Return the operating system's error that caused `error`, or None.

    Torch reports a full disk as an unexpected file position, and the real error is only among the causes.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


def is_full(error: BaseException) -> bool:
    """Return whether a full disk, or a quota, has caused the error."""
    found = find_system_error(error)
    return found is not None and found.errno in _FULL


def describe(error: BaseException, path: Path) -> str:
    """Return what went wrong when something was written below `path`, with the free space of its file system."""
    reported = find_system_error(error) or error
    return f"{type(reported).__name__}: {reported}; {describe_space(path)}"


def describe_space(path: Path) -> str:
    """Return in words how many bytes are free on the file system of a path, which need not exist yet."""
    try:
        disk = shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists()))
    except OSError:  # the file system itself may be gone
        return "its file system does not answer"
    return f"{disk.free:,} bytes free of {disk.total:,} on its file system"


def keep_printing() -> None:
    """Let this process lose lines of stdout and stderr, rather than fail, if they go to files on a full disk."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__") and stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            stream.flush()
            raw = io.BufferedWriter(_LossyFile(stream.fileno(), "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True))


class _LossyFile(io.FileIO):
    """A file that drops what a full disk does not take."""

    def write(self, content: ReadableBuffer, /) -> int:
        """Write some bytes, or drop them. Return their number."""
        try:
            return super().write(content) or 0
        except OSError as error:
            if not is_full(error):
                raise
            return memoryview(content).nbytes


class WaitingWrites:
    """What a full disk did not take. It waits in memory until the disk does, in its order, and is said once.

    What waits is lost if the process is killed.
    """

    def __init__(self, directory: Path):
        """Start with nothing that waits. `directory` is on the disk, and is named in warnings."""
        self._directory = directory
        self._waiting: dict[str, deque[Callable[[], object]]] = {}
        self._has_warned = False

    def write(self, place: str, write: Callable[[], object]) -> None:
        """Call `write` now, or later if the disk is full, after what waits for the same `place`.

        Raises:
            OSError: It fails for another reason than a full disk.
        """
        self._waiting.setdefault(place, deque()).append(write)
        try:
            self.finish()
        except OSError as error:
            if not is_full(error):
                raise
            if not self._has_warned:
                self._has_warned = True
                log.LOGGER.warning(
                    "%s: metrics and samples cannot be written (%s); training goes on, and they wait in memory: free "
                    "space",
                    *(self._directory, describe(error, self._directory)),
                )

    def finish(self) -> None:
        """Write what waits.

        Raises:
            OSError: Something cannot be written, and still waits. It is the first of several errors.
        """
        failed = None
        for waiting in self._waiting.values():
            try:
                while waiting:
                    try:
                        waiting[0]()
                    except BaseException as error:
                        if not is_full(error):
                            waiting.popleft()  # it fails again and again
                        raise
                    waiting.popleft()
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed
        if self._has_warned:
            self._has_warned = False
            log.LOGGER.warning("%s: all metrics and samples are written again", self._directory)

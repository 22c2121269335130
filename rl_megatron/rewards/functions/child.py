"""Run a Python file in a child process with limits on time, memory and files, and end all processes that it starts."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rl_megatron.topology.child_process import adopt_orphans

_MEBIBYTE = 1 << 20
_LARGEST_FILE = 16 * _MEBIBYTE
_SECONDS_TO_END_ALL = 2.0  # for processes that start others faster than they are ended


@dataclass(frozen=True)
class Limits:
    """The limits of a child process.

    Attributes:
        seconds: CPU time, and time by the clock.
        memory_mb: Memory, in MiB.
    """

    seconds: float
    memory_mb: int

    def set(self) -> None:
        """Set the limits of this process.

        The number of processes has none: Linux counts all processes of a user, and does not limit root.
        """
        cpu, memory = max(1, int(self.seconds + 0.999)), self.memory_mb * _MEBIBYTE
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@contextmanager
def running(
    arguments: Sequence[str], directory: str, limits: Limits, stdin: int, stdout: int, descriptors: Sequence[int] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python with arguments in a directory, during the block of a `with` statement. Nothing of it remains."""
    with _ending_all_children():
        child = subprocess.Popen(
            [sys.executable, "-I", *arguments], stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, cwd=directory,
            env={"PATH": os.defpath, "HOME": directory, "OMP_NUM_THREADS": "1"},
            start_new_session=True, pass_fds=descriptors, preexec_fn=limits.set,
        )  # fmt: skip
        try:
            yield child
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextmanager
def _ending_all_children() -> Iterator[None]:
    """End, after the block of a `with` statement, the processes that were started in it and outlive their parents.

    On Linux, a process whose parent has ended becomes a child of this one, also if it has a session of its own. On
    other systems, such a process remains.
    """
    if not adopt_orphans():
        yield
        return
    before = _children()
    try:
        yield
    finally:
        until = time.monotonic() + _SECONDS_TO_END_ALL
        while (more := _children() - before) and time.monotonic() < until:
            for pid in more:
                with suppress(ProcessLookupError, PermissionError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)  # its own children are ours from now on


def _children() -> set[int]:
    """Return the children of all threads of this process."""
    found: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended, or the kernel does not have this file
            found.update(map(int, (thread / "children").read_text().split()))
    return found

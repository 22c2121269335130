"""Requests to Linux about a process: end it with its parent, hide its memory, and let it adopt orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36  # of prctl
_SECONDS_TO_END_ALL = 5.0  # limits killing all children, which may start others meanwhile


def die_with(parent: int) -> None:
    """Make this process end with its parent, however the parent ends.

    On Linux the process ends at once; on other systems, when it next reads from its socket. Linux sends the signal when
    the thread that started the process ends, so start the process from a thread that lives long enough: the main one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent had ended already
        sys.exit(0)


def hide_memory() -> None:
    """Keep the user's other processes, such as programs of a model, from reading this one's memory (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def adopt_orphans() -> bool:
    """Make this process the parent of descendants whose own parent ends; return whether the system can do it."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def list_children() -> set[int]:
    """Return the children of all threads of this process; none on systems other than Linux."""
    children: set[int] = set()
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # the thread has ended, or the kernel does not have this file
            children.update(map(int, (thread / "children").read_text().split()))
    return children


def end_children(others: AbstractSet[int] = frozenset()) -> None:
    """Kill the children of this process, after `adopt_orphans` also orphaned descendants, but not `others`.

    On Linux, this reaches processes in other sessions, too. On other systems, it kills nothing.
    """
    until = time.monotonic() + _SECONDS_TO_END_ALL
    while (remaining := list_children() - others) and time.monotonic() < until:
        for pid in remaining:
            with suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)  # with `adopt_orphans`, its children are ours from now on

"""Rollout engines of runs and ranks that are forks of `tests.forkserver`: the engine is a fork of the rank.

A new Python process needs five seconds of a core to import torch and transformers, and the forks have imported them.
Everything else is as in a new process: the engine is a child of the rank, has a session, an environment and a working
directory of its own, and no open files but its sockets and standard streams. Runs of the real command start new
processes, as do the tests of `tests/unit/generation/test_worker_process.py`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NAME = "rollout engine"  # in /proc/PID/comm, of at most 15 characters
_PR_SET_NAME, _STDERR = 15, 2
_OTHERS = ("rl_megatron.rewards.worker", "rl_megatron.rollouts.host_child")  # new processes: they import little
_kept: list[object] = []  # what a child must never destroy: a process group would wait for threads that it lacks


class ForkedEngine:
    """What `subprocess.Popen` offers of a process, for a fork that runs a module."""

    def __init__(
        self, command: Sequence[str], pass_fds: Sequence[int], stdin: int, stdout: int, env: dict[str, str],
        start_new_session: bool,
    ):  # fmt: skip
        """Fork this process; the child runs the module of the command `python -m MODULE ARGUMENTS`."""
        assert stdin == subprocess.DEVNULL and stdout == _STDERR and start_new_session
        self.returncode: int | None = None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_an_engine(command[2], command[3:], pass_fds, env)

    def poll(self) -> int | None:
        """Return the exit status if the process has ended: that of `wait`."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; return its exit status, or minus the signal that killed it."""
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked engine", timeout or 0.0)
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        """Kill the process."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def _be_an_engine(module: str, arguments: Sequence[str], descriptors: Sequence[int], env: dict[str, str]) -> None:
    """Run the module in this fork, and leave with its exit status."""
    status = 1
    try:
        gc.freeze()  # no object of the rank may close a descriptor that has its number again
        _leave_process_group()
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME.encode())
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(_STDERR, 1)
        _close_all_but({0, 1, 2, *descriptors, *_of_multiprocessing()})
        os.environ.clear()
        os.environ.update(env)
        sys.argv[1:] = arguments
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)  # without the rank's handlers of exit


def _leave_process_group() -> None:
    """Forget the rank's process group, and the handlers of its log."""
    import torch.distributed as dist

    from rl_megatron import log

    if dist.is_initialized():
        _kept.append(dist.group.WORLD)
        dist.GroupMember.WORLD = None
    log.LOGGER.handlers = []


def is_engine(pid: int) -> bool:
    """Return whether the process is a forked engine; False if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == NAME
    except (FileNotFoundError, ProcessLookupError):
        return False


def _of_multiprocessing() -> set[int]:
    """Return the descriptor of the tracker of shared memory, which a new process would inherit too."""
    from multiprocessing import resource_tracker

    tracker = resource_tracker._resource_tracker._fd  # pyright: ignore[reportAttributeAccessIssue]
    return set() if tracker is None else {tracker}


def _close_all_but(kept: set[int]) -> None:
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:
            with suppress(OSError):  # that of the directory itself is closed already
                os.close(descriptor)


def uninstall() -> None:
    """Make this process start engines as new processes, as the package does."""
    from rl_megatron.workers import child_process

    child_process.subprocess = subprocess  # pyright: ignore[reportAttributeAccessIssue]


def install() -> None:
    """Make this process, and all of its forks, start engines as forks."""
    from rl_megatron.workers import child_process

    def start(command: Sequence[str], **options: Any) -> ForkedEngine | subprocess.Popen[bytes]:
        is_engine_module = command[:2] == [sys.executable, "-m"] and command[2] not in _OTHERS
        return (ForkedEngine if is_engine_module else subprocess.Popen)(command, **options)

    child_process.subprocess = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        Popen=start, DEVNULL=subprocess.DEVNULL
    )

"""Start a launcher, such as that of scripts/train.sh, whose ranks are forks of this process, which has imported torch.

The launcher itself is the real one: it watches ranks, starts them again, and passes signals on. Only the `exec` of
Python, and the imports, are left out.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from benchmarks.faults.cases import RANKS, SECONDS
from benchmarks.faults.full_disk import DISK
from rl_megatron.cli import launcher
from rl_megatron.cli import main as rl_megatron
from rl_megatron.workers.linux import die_with

OUTPUT = "output.txt"  # what the launcher and its ranks print
_SHUTDOWN_SECONDS = 5  # that torch's agent gives ranks which it ends after a failure


class Fork:
    """A forked process, as torch's agent uses a `subprocess.Popen`."""

    def __init__(self, main: Callable[[], int]):
        """Fork a process of its own session, which calls `main` and exits with the status that it returns."""
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_in_fork(main)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when the process has ended.

        Raises:
            TimeoutExpired: It still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless its end is known."""
        if self.poll() is None:
            os.kill(self.pid, number)


def start(
    directory: Path, arguments: Sequence[str], restarts: int, prepare: Callable[[], object], seconds: float = SECONDS
) -> Fork:
    """Start a run under the launcher.

    Args:
        directory: Its working directory. What it prints is added to the file `OUTPUT` there.
        arguments: The arguments of `rl-megatron`.
        restarts: How often the launcher starts ranks again.
        prepare: Called in every rank before the command.
        seconds: How long the launcher waits for a rank after another one has ended well.
    """
    parent = os.getpid()

    def in_fork() -> int:
        die_with(parent)
        os.chdir(directory)
        output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)  # it was imported before
        if Path(DISK, "tmp").is_dir():
            os.environ["TMPDIR"] = str(directory / DISK / "tmp")
            tempfile.tempdir = None  # this process knows another one
        launcher.SECONDS_TO_FOLLOW = seconds
        options = ["--nproc-per-node", str(RANKS), "--max-restarts", str(restarts), "--standalone"]
        options += ["--shutdown-timeout", str(_SHUTDOWN_SECONDS), "--monitor-interval", "0.1"]
        return launch(launcher.main, [*options, "-m", "rl_megatron", *arguments], prepare)

    return Fork(in_fork)


def launch(main: Callable[[list[str]], int], arguments: list[str], prepare: Callable[[], object]) -> int:
    """Call the main function of a launcher, whose ranks shall be forks of this process, and return its exit status.

    Args:
        main: `launcher.main`, or that of torchrun.
        arguments: Its arguments, which end with `-m rl_megatron` and the arguments of `rl-megatron`.
        prepare: Called in every rank before the command.
    """

    def rank(command: Sequence[str], variables: dict[str, str]) -> Any:
        def run() -> int:
            os.environ.clear()
            os.environ.update(variables)
            prepare()
            return rl_megatron(list(command[command.index("rl_megatron") + 1 :]))

        return Fork(run)

    SubprocessHandler._popen = lambda _, command, variables: rank(command, variables)  # pyright: ignore
    return main(arguments)


def _run_in_fork(main: Callable[[], int]) -> None:
    """Call `main` as a process of its own would, and leave this process with its exit status."""
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        status = main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # waits for threads, as an interpreter's end
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

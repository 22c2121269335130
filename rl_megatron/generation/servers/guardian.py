"""Run a server, and end it when the rank that started it ends, for any reason.

Usage: python -m rl_megatron.generation.servers.guardian DIRECTORY COMMAND…

The guardian runs COMMAND and returns its exit status. It ends COMMAND when its own standard input ends, which happens
when the rank closes it or has ended in any way, and when it is asked to end by a signal. A server has processes of its
own, which can outlive it, so the guardian then ends all of them, and removes DIRECTORY.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from rl_megatron.topology.child_process import adopt_orphans

_POLL_SECONDS = 0.1
_SECONDS_TO_LEAVE = 5.0
_SECONDS_TO_END_ALL = 5.0  # for processes that start others
_PR_SET_PDEATHSIG = 1


def main(directory: str, *command: str) -> int:
    """Run the command until it ends or standard input does, and return its exit status."""
    adopt_orphans()
    gone = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: gone.set())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it asks ranks to end; SLURM sends it to what they started as well
    threading.Thread(target=_watch_the_rank, args=(gone,), daemon=True).start()
    try:
        # It stays in the guardian's session, by which the rank finds its processes if the guardian is killed.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_die_too)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        return 127
    while child.poll() is None and not gone.wait(_POLL_SECONDS):
        pass
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_SECONDS_TO_LEAVE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    _end_orphans()
    shutil.rmtree(directory, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _watch_the_rank(gone: threading.Event) -> None:
    while os.read(0, 4096):  # not sys.stdin, which a thread may not hold when the interpreter ends
        pass
    gone.set()


def _die_too() -> None:
    """Let the command end with the guardian, if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_orphans() -> None:
    """End the processes that the command left behind. On Linux they are children of this process now."""
    until = time.monotonic() + _SECONDS_TO_END_ALL
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while time.monotonic() < until:
        try:
            left = [int(pid) for pid in children.read_text().split()]
        except OSError:  # not Linux
            return
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError, PermissionError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Run a server, and end it when the rank that started it ends, for any reason.

Usage: python -m rl_megatron.workers.guardian DIRECTORY COMMAND…

The guardian runs COMMAND and returns its exit status. It ends COMMAND on SIGTERM, SIGINT or SIGHUP, or when the
guardian's standard input ends, because the rank has closed it or has ended. A server starts processes that can outlive
it, so the guardian ends them after COMMAND, and removes DIRECTORY.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import partial

from rl_megatron.workers.linux import adopt_orphans, die_with, end_children

_POLL_SECONDS = 0.1
_SECONDS_TO_LEAVE = 5.0


def main(arguments: list[str]) -> int:
    """Run the command until it ends, standard input ends or a signal arrives; return the command's exit status."""
    directory, *command = arguments
    adopt_orphans()
    should_end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: should_end.set())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it asks ranks to end, but SLURM sends it to children, too
    threading.Thread(target=_watch_the_rank, args=(should_end,), daemon=True).start()
    try:
        # The command stays in the guardian's session, so that the rank finds its processes if the guardian is killed.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=partial(die_with, os.getpid())
        )
    except OSError as error:
        print(f"{command[0]} cannot be run: {error}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        return 127
    while child.poll() is None and not should_end.wait(_POLL_SECONDS):
        pass
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_SECONDS_TO_LEAVE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    status = child.wait()
    end_children()
    shutil.rmtree(directory, ignore_errors=True)
    return status if status >= 0 else 128 - status


def _watch_the_rank(should_end: threading.Event) -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock must be free when the interpreter exits
        pass
    should_end.set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The policy's end of engines that run as processes of their own: starting them, asking them, noticing that one died.

Questions and answers travel over a socket pair that only the two processes have: nothing listens on a network, and the
end of either process is the end of the line to the other.

On Linux an engine also ends while it is busy: PR_SET_PDEATHSIG. That follows the *thread* that started it, so engines
are to be started from a thread that lives as long as they are needed: the main one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from rl_megatron import log

WORKER_MODULE = "rl_megatron.generation.transformers.worker"
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_SECONDS_TO_LEAVE = 5.0
_PR_SET_PDEATHSIG = 1  # of Linux's prctl
_GRAVEST_FIRST = ("died", "failed", "refused", "broken")


class EngineDied(RuntimeError):
    """An engine's process ended, or did not answer in time."""


@dataclass(frozen=True)
class Answers:
    """Of all engines that were asked. Of the four ways to fail at most one message is there.

    values: in the engines' order; only where nothing failed.
    died: a process ended, or its time was up.  failed: it raised.  refused: what it got was not what was sent.
    broken: a collective failed there, which somebody else's failure does.
    """

    values: tuple[Any, ...] = ()
    died: str | None = None
    failed: str | None = None
    refused: str | None = None
    broken: str | None = None

    @property
    def failure(self) -> str | None:
        return next((message for kind in _GRAVEST_FIRST if (message := getattr(self, kind)) is not None), None)


class _Worker:
    """One process."""

    def __init__(self, index: int, patience: float):
        self.index = index
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER_MODULE, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is the policy's to hear; the engine ends with it
            )
        limit = struct.pack("ll", int(patience), int(patience % 1 * 1e6))  # a stopped process neither reads nor writes
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        self.connection = Connection(ours.detach())

    @property
    def name(self) -> str:
        return f"rollout engine {self.index} (process {self.process.pid})"

    def end(self) -> str:
        """How the process ended; it is killed if it has not."""
        try:
            status = self.process.wait(0.2)  # its end of the line closes a moment before it can be waited for
        except subprocess.TimeoutExpired:
            self.kill()
            return "stopped answering"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        self.connection.close()  # it reads the end of the line, and ends
        try:
            self.process.wait(_SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            self.kill()


class EngineWorkers:
    """`count` processes that are asked together."""

    def __init__(self, count: int, patience: float):
        """`patience`: seconds that an answer may take."""
        self._patience = patience
        self._workers = [_Worker(index, patience) for index in range(count)]
        self._waiting: dict[int, _Worker] = {}
        self._values: dict[int, Any] = {}
        self._answers = Answers()
        self._progress: dict[int, tuple[int, int]] = {}

    def ask(self, method: str, *arguments_of_each: tuple[Any, ...]) -> None:
        """Sends each of the first engines its question; `answers` has what became of it."""
        self._deadline = time.monotonic() + self._patience
        self._allowed = f"{self._patience / 60:.3g} minutes"
        self._waiting, self._values, self._answers, self._progress = {}, {}, Answers(), {}
        for worker, arguments in zip(self._workers, arguments_of_each, strict=False):
            try:
                worker.connection.send((method, arguments))
                self._waiting[worker.index] = worker
            except OSError:
                self._note_death(worker)

    def hurry(self, seconds: float, why: str) -> None:
        """What was asked last may take so long from now and no longer: an engine that is silent then counts as dead."""
        hurried = time.monotonic() + seconds
        if hurried < self._deadline:
            self._deadline, self._allowed = hurried, f"{seconds:g} seconds after {why}"

    def answers(self, seconds: float) -> Answers | None:
        """Once every engine that was asked has answered or died; None where that takes longer than `seconds`."""
        until = time.monotonic() + seconds
        while self._waiting and self._answers.died is None:
            now = time.monotonic()
            if now >= self._deadline:
                if self._answers.failed is not None:
                    break  # what it said tells more than another's silence
                worker = next(iter(self._waiting.values()))
                self._note(died=f"{worker.name} did not answer within {self._allowed}")
                break
            if now >= until:
                return None
            by_connection: dict[Any, _Worker] = {worker.connection: worker for worker in self._waiting.values()}
            for connection in wait(list(by_connection), min(until, self._deadline) - now):
                self._hear(by_connection[connection])
        if self._answers == Answers():
            return Answers(tuple(self._values[index] for index in sorted(self._values)))
        return self._answers

    def _hear(self, worker: _Worker) -> None:
        try:
            kind, value = worker.connection.recv()
        except (EOFError, OSError):
            self._note_death(worker)
            return
        if kind == "progress":
            self._report(worker, *value)
            return
        del self._waiting[worker.index]
        if kind == "answer":
            self._values[worker.index] = value
        else:
            self._note(**{kind: f"{worker.name}: {value}"})

    def _report(self, worker: _Worker, done: int, total: int, unit: str, detail: str) -> None:
        """Report how far all engines are that have said so."""
        self._progress[worker.index] = done, total
        all_done, all_total = map(sum, zip(*self._progress.values(), strict=True))
        log.report_progress(all_done, all_total, unit, detail)

    def _note_death(self, worker: _Worker) -> None:
        self._note(died=f"{worker.name} {worker.end()}")

    def _note(self, **failure: str) -> None:
        """The first of the gravest: a death explains what the others then found wrong."""
        (kind,) = failure
        as_grave = _GRAVEST_FIRST[: _GRAVEST_FIRST.index(kind) + 1]
        if all(getattr(self._answers, each) is None for each in as_grave):
            self._answers = replace(Answers(), **failure)

    def shutdown(self, at_once: bool = False) -> None:
        for worker in self._workers:
            if at_once:
                worker.kill()
            worker.leave()
        self._workers = []


def _environment() -> dict[str, str]:
    """This process's, without its rank, and where this package is found first."""
    kept = {key: value for key, value in os.environ.items() if key not in _OF_A_RANK}
    here = str(Path(__file__).resolve().parents[2])
    return kept | {"PYTHONPATH": os.pathsep.join([here, *filter(None, [kept.get("PYTHONPATH")])])}


def die_with(parent: int) -> None:
    """To be called by an engine's process: it ends with its parent, however that ends, whatever it is doing then (on
    other systems than Linux: once it has answered)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone already
        sys.exit(0)

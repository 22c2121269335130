"""Start engine processes, send them requests, and notice if one died.

Calls and answers are sent over a socket pair that only the two processes have, and single requests over another one.
Nothing listens on a network, and if either process ends, the other reads the end of the stream.

On Linux, PR_SET_PDEATHSIG also ends an engine that is busy when its parent dies. The signal follows the *thread* that
started the engine, so engines must be started from a thread that lives as long as they are needed: the main thread.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from rl_megatron import log
from rl_megatron.generation.transformers.requests import EngineRequests
from rl_megatron.timing import record_span
from rl_megatron.topology.child_process import describe_end, environment_of_a_child

WORKER_MODULE = "rl_megatron.generation.transformers.worker"
_SECONDS_TO_LEAVE = 5.0
_GRAVEST_FIRST = ("died", "failed", "refused", "broken")


class EngineDied(RuntimeError):
    """An engine's process ended, or did not answer in time."""


@dataclass(frozen=True)
class Answers:
    """The answers of all engines that were asked. At most one of the four failures is set.

    Attributes:
        values: The answers in the engines' order, if nothing failed.
        died: A process ended, or did not answer in time.
        failed: An engine raised an exception.
        refused: The weights that arrived are not those that were sent.
        broken: A collective failed in an engine, usually because another process failed.
    """

    values: tuple[Any, ...] = ()
    died: str | None = None
    failed: str | None = None
    refused: str | None = None
    broken: str | None = None

    @property
    def failure(self) -> str | None:
        """Return the message of the failure, or None."""
        return next((message for kind in _GRAVEST_FIRST if (message := getattr(self, kind)) is not None), None)


class _Worker:
    """One engine process, and this end of its sockets."""

    def __init__(self, index: int, timeout_seconds: float):
        self.index = index
        ours, theirs = socket.socketpair()
        our_requests, their_requests = socket.socketpair()
        with theirs, their_requests:
            descriptors = (theirs.fileno(), their_requests.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-m", WORKER_MODULE, *map(str, descriptors), str(os.getpid())],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                env=environment_of_a_child(),
                start_new_session=True,  # Ctrl-C reaches only the policy, with which the engine ends
            )
        # Without a time limit, reads from a stopped process and writes to it would block.
        limit = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        our_requests.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)  # answers may take any time
        self.connection, self.requests = Connection(ours.detach()), Connection(our_requests.detach())

    @property
    def name(self) -> str:
        """Return how messages call this engine."""
        return f"rollout engine {self.index} (process {self.process.pid})"

    def end(self) -> str:
        """Return how the process ended; kill it if it has not."""
        try:
            status = self.process.wait(0.2)  # its socket closes a moment before the process has ended
        except subprocess.TimeoutExpired:
            self.kill()
            return "stopped answering"
        return describe_end(status)

    def kill(self) -> None:
        """Kill the process, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """Let the process end by itself; kill it if that takes too long."""
        self.connection.close()  # the process reads the end of the stream, and ends
        try:
            self.process.wait(_SECONDS_TO_LEAVE)
        except subprocess.TimeoutExpired:
            self.kill()


class EngineWorkers:
    """Engine processes that are called together.

    Attributes:
        requests: The single requests to them.

    Args:
        count: The number of processes.
        timeout_seconds: Seconds that an answer may take.
    """

    def __init__(self, count: int, timeout_seconds: float):
        self._timeout_seconds = timeout_seconds
        self._workers = [_Worker(index, timeout_seconds) for index in range(count)]
        self._waiting: dict[int, _Worker] = {}
        self._values: dict[int, Any] = {}
        self._answers = Answers()
        self._progress: dict[int, tuple[int, int]] = {}
        self.requests = EngineRequests(
            [worker.requests for worker in self._workers], [worker.name for worker in self._workers]
        )

    def ask(self, method: str, *arguments_of_each: tuple[Any, ...]) -> None:
        """Send each of the first engines a request; `answers` returns the outcome.

        Args:
            method: The method of the engine's worker.
            arguments_of_each: Its arguments, for each engine that is asked.
        """
        self._deadline = time.monotonic() + self._timeout_seconds
        self._asked = method, time.time_ns()
        self._allowed = f"{self._timeout_seconds / 60:.3g} minutes"
        self._waiting, self._values, self._answers, self._progress = {}, {}, Answers(), {}
        for worker, arguments in zip(self._workers, arguments_of_each, strict=False):
            try:
                worker.connection.send((method, arguments))
                self._waiting[worker.index] = worker
            except OSError:
                self._note_death(worker)

    def hurry(self, seconds: float, why: str) -> None:
        """Shorten the deadline of the pending request. An engine that is silent then counts as dead.

        Args:
            seconds: The time that is left from now on.
            why: The reason, for the message.
        """
        hurried = time.monotonic() + seconds
        if hurried < self._deadline:
            self._deadline, self._allowed = hurried, f"{seconds:g} seconds after {why}"

    def answers(self, seconds: float) -> Answers | None:
        """Return the outcome once every engine has answered or died, or None if that takes longer than `seconds`."""
        until = time.monotonic() + seconds
        while self._waiting and self._answers.died is None:
            now = time.monotonic()
            if now >= self._deadline:
                if self._answers.failed is not None:
                    break  # an exception says more than the silence of another engine
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
        record_span(worker.name, *self._asked)
        if kind == "answer":
            self._values[worker.index] = value
        else:
            self._note(**{kind: f"{worker.name}: {value}"})

    def _report(self, worker: _Worker, done: int, total: int, noun: str, detail: str) -> None:
        """Report the progress of all engines together, as far as they have reported it."""
        self._progress[worker.index] = done, total
        all_done, all_total = map(sum, zip(*self._progress.values(), strict=True))
        log.report_progress(all_done, all_total, noun, detail)

    def _note_death(self, worker: _Worker) -> None:
        self._note(died=f"{worker.name} {worker.end()}")

    def _note(self, **failure: str) -> None:
        """Keep the first failure of the most severe kind: a death explains the failures that others report after it."""
        (kind,) = failure
        as_grave = _GRAVEST_FIRST[: _GRAVEST_FIRST.index(kind) + 1]
        if all(getattr(self._answers, each) is None for each in as_grave):
            self._answers = replace(Answers(), **failure)

    def shutdown(self, at_once: bool = False) -> None:
        """End all processes; `at_once` kills them."""
        for worker in self._workers:
            if at_once:
                worker.kill()
            worker.leave()
        self._workers = []

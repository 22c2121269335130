"""Start engine processes, send them requests, and notice if one dies.

Calls and single requests are sent over the socket of a `ChildProcess`, and a thread for each process receives the
answers. Engines must be started from the main thread, because they end when the thread that started them ends.
"""

from __future__ import annotations

import pickle
import queue
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rl_megatron import log
from rl_megatron.generation.interfaces import Completion, EngineFailed, EngineLost, Request
from rl_megatron.timing import record_span
from rl_megatron.workers.child_process import ChildProcess
from rl_megatron.workers.frames import read_frame, write_frame

WORKER_MODULE = "rl_megatron.generation.transformers.worker"
_SECONDS_TO_LEAVE = 5.0
_MOST_SEVERE_FIRST = ("died", "failed", "refused", "broken")


class EngineDied(RuntimeError):
    """The error if an engine's process has ended, or did not answer in time."""


@dataclass(frozen=True)
class Answers:
    """The answers of all engines that were called. At most one of the four failures is set.

    Attributes:
        values: The answers in the engines' order, if nothing failed.
        died: A process ended, or did not answer in time.
        failed: An engine raised an exception.
        refused: The weights that arrived are not those that were sent.
        broken: A collective failed in an engine, usually because another process failed.
    """

    values: tuple[object, ...] = ()
    died: str | None = None
    failed: str | None = None
    refused: str | None = None
    broken: str | None = None

    @property
    def failure(self) -> str | None:
        """Return the message of the failure, or None if nothing failed."""
        return next((message for kind in _MOST_SEVERE_FIRST if (message := getattr(self, kind)) is not None), None)


class EngineProcess:
    """One engine process. Any thread may send it messages.

    Attributes:
        index: The engine's number.
        name: The engine's name for messages.
        socket: The policy's end of the socket, from which one thread reads.
    """

    def __init__(self, index: int, timeout_seconds: float):
        self._process = ChildProcess(WORKER_MODULE, threads=None)
        self.index, self.name = index, f"rollout engine {index} (process {self._process.pid})"
        self.socket, self._sending = self._process.socket, threading.Lock()
        self.socket.setblocking(True)
        # Writes have a limit, because a write to a stopped process would block. Reads have none: answers take long.
        limit = struct.pack("ll", int(timeout_seconds), int(timeout_seconds % 1 * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, kind: str, method: str, arguments: tuple[object, ...]) -> None:
        """Call a method of `TransformersWorker` if `kind` is "call", or of `PendingRequests` if it is "request".

        OSError is raised if the process has ended, or does not read.
        """
        with self._sending:
            write_frame(self.socket, pickle.dumps((kind, method, arguments)))

    def end(self) -> str:
        """Kill the process, unless it has ended; return how it ended."""
        has_exited = self._process.has_exited()
        how = self._process.end()
        return how if has_exited else "stopped answering"

    def leave(self, seconds: float) -> None:
        """Let the process end by itself; kill it if that takes longer than `seconds`."""
        self._process.leave(seconds)


class EngineRequests:
    """The single requests of engine processes, and their futures.

    Any thread may call its methods. Requests to a process that has ended fail.

    Attributes:
        has_lost_a_process: Whether a process has ended.
    """

    def __init__(self, processes: Sequence[EngineProcess]):
        """Start without requests. The processes must have no other `EngineRequests`."""
        self._processes = list(processes)
        self._lock = threading.Lock()
        self.has_lost_a_process = False
        self._futures: dict[str, tuple[int, Future[Completion]]] = {}  # with the number of the process

    def put(self, request: Request) -> Future[Completion]:
        """Send a request to the process with the fewest requests, and return the future of its completion.

        Raises:
            ValueError: Another request without a completion has this id.
            EngineLost: The process has ended.
        """
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()  # a request ends by `abort`, and not by cancelling its future
        with self._lock:
            if request.request_id in self._futures:
                raise ValueError(f"request id {request.request_id!r} belongs to a request that has no completion yet")
            load = [0] * len(self._processes)
            for index, _ in self._futures.values():
                load[index] += 1
            index = load.index(min(load))
            self._futures[request.request_id] = index, future
            try:
                self._processes[index].send("request", "add", (request,))
            except OSError as error:
                del self._futures[request.request_id]
                raise EngineLost(f"{self._processes[index].name} has ended") from error
        return future

    def abort(self, request_id: str) -> None:
        """End a request, if it has no completion yet."""
        with self._lock:
            if request_id in self._futures:
                with suppress(OSError):  # the process has ended, so `end` makes the request fail
                    self._processes[self._futures[request_id][0]].send("request", "abort", (request_id,))

    def take(self, process: EngineProcess, answers: Sequence[Any], failure: str | None) -> None:
        """Set the results of some requests: `answers` has completions or, with a `failure`, ids of failed requests."""
        with self._lock:
            for answer in answers:
                if failure is None:
                    self._futures.pop(answer.request_id)[1].set_result(answer)
                else:
                    self._futures.pop(answer)[1].set_exception(EngineFailed(f"{process.name}: {failure}"))

    def end(self, process: EngineProcess) -> None:
        """Make all requests of a process that has ended fail with EngineLost."""
        with self._lock:
            self.has_lost_a_process = True
            lost = [request_id for request_id, (index, _) in self._futures.items() if index == process.index]
            for request_id in lost:
                self._futures.pop(request_id)[1].set_exception(EngineLost(f"{process.name} has ended"))


class EngineWorkers:
    """The engine processes, which are called together.

    Attributes:
        requests: The single requests of the engines.
    """

    def __init__(self, count: int, timeout_seconds: float):
        """Start `count` processes, whose answers may take `timeout_seconds`."""
        self._timeout_seconds = timeout_seconds
        self._workers = [EngineProcess(index, timeout_seconds) for index in range(count)]
        self._received: queue.SimpleQueue[tuple[EngineProcess, str, Any]] = queue.SimpleQueue()
        self._waiting: dict[int, EngineProcess] = {}
        self._values: dict[int, object] = {}
        self._answers = Answers()
        self._progress: dict[int, tuple[int, int]] = {}
        self.requests = EngineRequests(self._workers)
        for worker in self._workers:
            threading.Thread(target=self._listen, args=(worker,), name=f"answers of {worker.name}", daemon=True).start()

    def _listen(self, worker: EngineProcess) -> None:
        """Receive the messages of a process until it ends."""
        with suppress(OSError):
            while (message := read_frame(worker.socket)) is not None:
                kind, value = message
                if kind == "completions":
                    self.requests.take(worker, *value)
                else:
                    self._received.put((worker, kind, value))
        self.requests.end(worker)
        self._received.put((worker, "ended", None))

    def ask(self, method: str, *arguments: tuple[object, ...]) -> None:
        """Call a method of one engine for each of `arguments`; `collect_answers` returns the outcome."""
        self._deadline = time.monotonic() + self._timeout_seconds
        self._asked = method, time.time_ns()
        self._allowed = f"{self._timeout_seconds / 60:.3g} minutes"
        self._waiting, self._values, self._answers, self._progress = {}, {}, Answers(), {}
        for worker, of_worker in zip(self._workers, arguments, strict=False):
            try:
                worker.send("call", method, of_worker)
                self._waiting[worker.index] = worker
            except OSError:
                self._note_death(worker)

    def hurry(self, seconds: float, why: str) -> None:
        """Leave at most `seconds` for the pending call, for the reason `why`.

        An engine that has not answered by then counts as dead.
        """
        hurried = time.monotonic() + seconds
        if hurried < self._deadline:
            self._deadline, self._allowed = hurried, f"{seconds:g} seconds after {why}"

    def collect_answers(self, seconds: float) -> Answers | None:
        """Return the outcome once all engines answered or one died, or None if that takes longer than `seconds`."""
        until = time.monotonic() + seconds
        while self._waiting and self._answers.died is None:
            now = time.monotonic()
            if now >= self._deadline:
                if self._answers.failed is not None:
                    break  # an exception explains more than the silence of another engine
                worker = next(iter(self._waiting.values()))
                self._note(died=f"{worker.name} did not answer within {self._allowed}")
                break
            if now >= until:
                return None
            with suppress(queue.Empty):
                self._handle(*self._received.get(timeout=min(until, self._deadline) - now))
        if self._answers == Answers():
            return Answers(tuple(self._values[index] for index in sorted(self._values)))
        return self._answers

    def _handle(self, worker: EngineProcess, kind: str, value: Any) -> None:
        if worker.index not in self._waiting:
            return
        if kind == "ended":
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

    def _report(self, worker: EngineProcess, done: int, total: int, noun: str, detail: str) -> None:
        """Report the total progress of all engines that have reported any."""
        self._progress[worker.index] = done, total
        all_done, all_total = map(sum, zip(*self._progress.values(), strict=True))
        log.report_progress(all_done, all_total, noun, detail)

    def _note_death(self, worker: EngineProcess) -> None:
        self._note(died=f"{worker.name} {worker.end()}")

    def _note(self, **failure: str) -> None:
        """Keep the first failure of the most severe kind: a death explains the failures that others report after it."""
        (kind,) = failure
        as_severe = _MOST_SEVERE_FIRST[: _MOST_SEVERE_FIRST.index(kind) + 1]
        if all(getattr(self._answers, other) is None for other in as_severe):
            self._answers = replace(Answers(), **failure)

    def shutdown(self, at_once: bool = False) -> None:
        """End all processes; `at_once` kills them."""
        for worker in self._workers:
            worker.leave(0.0 if at_once else _SECONDS_TO_LEAVE)
        self._workers = []

"""Distribute calls of reward functions among worker processes, with a time limit for every call."""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.rewards.samples import Description, Failure, FunctionSpec, Outcome, Sample, dumps
from rl_megatron.workers.child_process import ChildProcess

WORKER_MODULE = "rl_megatron.rewards.worker"
_MOST_WORKERS = 32  # if reward.num_workers=null
_SECONDS_TO_LOAD = 120.0
_SECONDS_BETWEEN_LOOKS = 0.1  # at processes whose socket is silent
_GRACE_SECONDS = 1.0  # an event loop counts as blocked if it has not run for this long beyond the time limit
_AHEAD = 2  # the most calls that a worker has at a time: while it runs one, the next one already waits
_AHEAD_IF_SHORT = 16
_SHORT_SECONDS = 0.002  # calls are short if their mean time is less than this
_WORTH_A_WORKER_SECONDS = 0.3  # of waiting work per worker: another worker takes about this long to start
_MOST_ATTEMPTS = 2  # of a call whose worker ended; in the second attempt, the worker has no other call


@dataclass
class Job:
    """Functions to call for one sample, or one function to call for all samples.

    Attributes:
        kind: "call" (functions in order, for one sample), "await" (an async function) or "list" (all samples).
        functions: The indices of the functions that have not answered.
        samples: The indices of the samples.
        since: When it was sent, or when the worker last answered while this was its oldest job, in `time.monotonic`.
        attempts: The number of workers that ended for an unknown reason while they had this job.
    """

    number: int
    kind: str
    functions: list[int]
    samples: list[int]
    since: float = 0.0
    attempts: int = 0


@dataclass
class WorkerHandle:
    """A worker process and its jobs by their numbers, in the order in which they were sent."""

    process: ChildProcess
    started: float
    is_ready: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)

    @property
    def oldest(self) -> Job | None:
        """Return the unfinished job that was sent first, or None if the worker has no job."""
        return next(iter(self.jobs.values()), None)

    def can_take(self, kind: str, most: int) -> bool:
        """Return whether the worker can get another `kind` job: it has fewer than `most` jobs, all of this kind."""
        are_alike = all(job.kind == kind and not job.attempts for job in self.jobs.values())
        return self.is_ready and len(self.jobs) < most and are_alike

    def send(self, job: Job, samples: Sequence[Sample]) -> None:
        """Send a job to the worker, with those of all `samples` that belong to the job."""
        job.since = time.monotonic()
        self.jobs[job.number] = job
        if job.kind == "list":
            self.process.send("list", job.number, job.functions[0], [samples[index] for index in job.samples])
        else:
            functions = job.functions[0] if job.kind == "await" else job.functions
            self.process.send(job.kind, job.number, functions, samples[job.samples[0]])

    def is_late(self, limit: float) -> bool:
        """Return whether the running call has taken longer than `limit` seconds, without its time in the queue.

        A worker cancels late async calls itself, unless one of them blocks its event loop.
        """
        oldest = self.oldest
        if oldest is None:
            return False
        start = max(oldest.since, self.process.mark.touched)
        return time.monotonic() - start > limit + (_GRACE_SECONDS if oldest.kind == "await" else 0.0)

    def find_call(self) -> tuple[Job, int] | None:
        """Return the job and the function that the worker calls, or called when it ended; None if that is unknown."""
        number, function = self.process.mark.read() or (-1, -1)
        job = self.jobs.get(number)
        return None if job is None or function not in job.functions else (job, function)


class RewardWorkers:
    """The worker processes of one rank. They are started when there is work for them, and live until `close`.

    Attributes:
        descriptions: The first worker's descriptions of the functions; None until it has loaded them.
        outcomes: The outcomes so far, by the indices (function, sample).
        failed: (function, sample, failure) of the first failure that ends the run, or None.
    """

    def __init__(self, functions: Sequence[FunctionSpec], settings: RewardConfig):
        """Start no process yet."""
        self._functions, self._settings = list(functions), settings
        self._most = settings.num_workers or min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        self._workers: list[WorkerHandle] = []
        self._waiting: dict[str, deque[Job]] = {kind: deque() for kind in ("list", "await", "call")}
        self._samples: list[Sample] = []
        self._num_jobs = self._num_expected = self._num_calls = 0
        self._seconds_of_calls = self._last_look = 0.0
        self.descriptions: list[Description] | None = None
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.failed: tuple[int, int, Failure] | None = None

    def start(self) -> None:
        """Start the first worker, if there is none, without waiting for it."""
        if not self._workers:
            self._start_worker()

    def load(self) -> list[Description]:
        """Let a worker load the functions, and return its descriptions of them.

        Raises:
            ConfigError: A function cannot be loaded or called.
        """
        self.start()
        while self.descriptions is None:
            self._receive(_SECONDS_BETWEEN_LOOKS)
            self._check_deadlines()
        return self.descriptions

    def submit(self, samples: Sequence[Sample], mine: Sequence[int], with_lists: bool) -> None:
        """Begin to score samples; `advance` continues.

        Args:
            samples: The samples that this rank has.
            mine: Indices of the samples for which these workers call functions that score one sample at a time.
            with_lists: Whether these workers also call the functions that score a list, which gets all samples.

        Raises:
            ConfigError: A function cannot be loaded or called.
        """
        functions = list(enumerate(self.load()))
        self._samples, self.outcomes, self.failed = list(samples), {}, None
        plain = [index for index, function in functions if function.form != "list" and not function.is_async]
        awaited = [index for index, function in functions if function.form != "list" and function.is_async]
        lists = [index for index, function in functions if function.form == "list" and with_lists and samples]
        for index in lists:
            self._enqueue("list", [index], list(range(len(samples))))
        for sample in mine:
            for index in awaited:
                self._enqueue("await", [index], [sample])
            if plain:
                self._enqueue("call", list(plain), [sample])
        self._num_expected = len(lists) * len(samples) + (len(plain) + len(awaited)) * len(mine)

    def advance(self, seconds: float) -> bool:
        """Run calls for at most `seconds`; return whether all calls are done or a failure ends the run.

        Raises:
            ConfigError: A new worker cannot load a function.
        """
        until = time.monotonic() + seconds
        while self.failed is None and len(self.outcomes) < self._num_expected:
            self._send_jobs()
            self._start_more()
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._receive(min(left, _SECONDS_BETWEEN_LOOKS))
            self._check_deadlines()
        if self.failed is not None:
            self.abandon()
        return True

    def abandon(self) -> None:
        """Drop all jobs, and kill the workers that have jobs or still load the functions."""
        for jobs in self._waiting.values():
            jobs.clear()
        for worker in [worker for worker in self._workers if worker.jobs or not worker.is_ready]:
            worker.process.end()
            self._workers.remove(worker)

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.process.leave()
        self._workers = []

    def _enqueue(self, kind: str, functions: list[int], samples: list[int]) -> None:
        self._num_jobs += 1
        self._waiting[kind].append(Job(self._num_jobs, kind, functions, samples))

    def _start_worker(self) -> None:
        worker = WorkerHandle(ChildProcess(WORKER_MODULE, dumps=dumps), time.monotonic())
        worker.process.prepare(self._settings.memory_limit_mb)
        worker.process.send("load", self._functions, self._settings.timeout_seconds)
        self._workers.append(worker)

    def _start_more(self) -> None:
        """Start further workers if enough work waits for them."""
        num_waiting = sum(map(len, self._waiting.values()))
        num_free = min(self._most - len(self._workers), num_waiting)
        if num_free <= 0:
            return
        ready = [worker for worker in self._workers if worker.is_ready]
        if not self._workers or self._waiting["list"] and len(ready) == len(self._workers):
            self._start_worker()
        elif ready and num_waiting * self._seconds_per_call(ready) / len(self._workers) > _WORTH_A_WORKER_SECONDS:
            for _ in range(num_free):
                self._start_worker()

    def _seconds_per_call(self, ready: Sequence[WorkerHandle]) -> float:
        now = time.monotonic()
        longest = max((now - job.since for worker in ready if (job := worker.oldest) is not None), default=0.0)
        return max(longest, self._seconds_of_calls / max(self._num_calls, 1))

    def _send_jobs(self) -> None:
        are_short = self._num_calls > 0 and self._seconds_of_calls / self._num_calls < _SHORT_SECONDS
        most = {"list": 1, "await": self._settings.concurrency, "call": _AHEAD_IF_SHORT if are_short else _AHEAD}
        for worker in sorted(self._workers, key=lambda worker: len(worker.jobs)):
            for kind, jobs in self._waiting.items():
                while jobs and worker.can_take(kind, 1 if jobs[0].attempts else most[kind]):
                    worker.send(jobs.popleft(), self._samples)

    def _receive(self, seconds: float) -> None:
        """Wait for messages for at most `seconds`, and handle those that have arrived."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                events = selectors.EVENT_WRITE if worker.process.wants_to_write else 0
                selector.register(worker.process.socket, selectors.EVENT_READ | events, worker)
            active: list[WorkerHandle] = [key.data for key, _ in selector.select(seconds)]
        for worker in active:
            worker.process.flush()
            for message in worker.process.receive():
                self._handle_message(worker, *message)
        if time.monotonic() - self._last_look >= _SECONDS_BETWEEN_LOOKS:
            self._last_look = time.monotonic()
            for worker in self._workers:
                worker.process.poll()
        for worker in [worker for worker in self._workers if worker.process.has_ended]:
            self._handle_end(worker)
        if active and self._num_expected:
            log.report_progress(len(self.outcomes), self._num_expected, "rewards")

    def _handle_message(self, worker: WorkerHandle, kind: str, *parts: Any) -> None:
        if kind == "refused":
            self.abandon()
            raise ConfigError(parts[0])
        if kind == "loaded":
            worker.is_ready, self.descriptions = True, parts[0]
            return
        number, function, outcomes = parts
        job, now = worker.jobs.get(number), time.monotonic()
        if job is None or function not in job.functions:
            return
        if job.kind == "call":
            self._seconds_of_calls += now - job.since
            self._num_calls += 1
        self._record(job, function, outcomes)
        job.functions.remove(function)
        if not job.functions:
            del worker.jobs[number]
        if job.kind == "call" and (following := worker.oldest) is not None:
            following.since = now

    def _record(self, job: Job, function: int, outcomes: Sequence[Outcome]) -> None:
        """Record the outcomes of a function, and the first failure that ends the run."""
        for sample, outcome in zip(job.samples, outcomes, strict=True):
            self.outcomes[function, sample] = outcome
            failure = outcome.failure
            if failure is not None and self.failed is None:
                settings = self._settings
                if (settings.on_timeout if failure.kind == "timeout" else settings.on_error) == "error":
                    self.failed = function, sample, failure

    def _check_deadlines(self) -> None:
        """End the workers whose calls take too long."""
        now, limit = time.monotonic(), self._settings.timeout_seconds
        for worker in list(self._workers):
            if not worker.is_ready:
                if now - worker.started > _SECONDS_TO_LOAD:
                    self.abandon()
                    raise ConfigError(
                        f"reward.functions: a worker process could not load them within {_SECONDS_TO_LOAD:g} seconds; "
                        "make the functions' files quicker to import"
                    )
                continue
            if worker.is_late(limit):
                oldest = worker.oldest
                call = worker.find_call()
                if call is None and oldest is not None and oldest.kind != "await":
                    call = oldest, oldest.functions[0]
                self._end(worker, call, Failure("timeout", f"took longer than {limit:g} seconds"))

    def _handle_end(self, worker: WorkerHandle) -> None:
        """Record the failure of the call that ended a worker, and repeat its other calls.

        If an async call closed the socket and the process still runs, the mark may name another call and is not read.
        """
        is_async = (oldest := worker.oldest) is not None and oldest.kind == "await"
        call = worker.find_call() if not is_async or worker.process.has_exited() else None
        if not worker.is_ready:
            how = worker.process.end()
            self._workers.remove(worker)
            self.abandon()
            raise ConfigError(f"reward.functions: a worker process {how} while it loaded them; see its output above")
        self._end(worker, call, None)

    def _end(self, worker: WorkerHandle, call: tuple[Job, int] | None, failure: Failure | None) -> None:
        """Kill a worker, record the failure of one call, and repeat its other calls.

        Args:
            worker: The worker.
            call: The job and the function of the call that fails. None: the failed call is unknown, so each job is
                repeated alone.
            failure: Why the call fails. None: it ended its worker process.
        """
        failed = [] if call is None else [call]
        if call is None:
            for job in worker.jobs.values():
                job.attempts += 1
                if job.attempts >= _MOST_ATTEMPTS:
                    failed.append((job, job.functions[0]))
        how = worker.process.end()
        self._workers.remove(worker)
        for job, function in failed:
            job.functions.remove(function)
            outcome = Outcome(None, {}, failure or Failure("error", f"ended its worker process, which {how}"))
            self._record(job, function, [outcome] * len(job.samples))
        for job in reversed([job for job in worker.jobs.values() if job.functions]):
            self._waiting[job.kind].appendleft(job)

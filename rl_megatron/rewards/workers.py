"""Share calls of reward functions out among worker processes, with a time limit for every call."""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.rewards import RewardConfig
from rl_megatron.rewards.jobs import Job, WorkerHandle
from rl_megatron.rewards.samples import Description, Failure, FunctionSpec, Outcome, Sample, dumps
from rl_megatron.workers.child_process import ChildProcess

WORKER_MODULE = "rl_megatron.rewards.worker"
_MOST_WORKERS = 32  # of reward.num_workers=null
_SECONDS_TO_LOAD = 120.0
_SECONDS_BETWEEN_LOOKS = 0.1  # at processes whose socket is silent
_AHEAD = 2  # calls that a worker has before it ends the first, so that it never waits for the next
_AHEAD_IF_SHORT = 16
_SHORT_SECONDS = 0.002  # of a call
_WORTH_A_WORKER_SECONDS = 0.3  # of work that waits: a worker starts in about this time
_MOST_ATTEMPTS = 2  # of a call whose worker ended; the second one is made alone


class RewardWorkers:
    """The worker processes beside one rank. They are started when there is work for them, and live until `close`.

    Attributes:
        descriptions: What the first worker found out about each function; None until it has loaded them.
        outcomes: What was said so far about (function, sample), both by index.
        failed: The first failure that ends the run, with its function and sample; None if there is none.
    """

    def __init__(self, functions: Sequence[FunctionSpec], settings: RewardConfig):
        """Start no process yet."""
        self._functions, self._settings = list(functions), settings
        self._most = settings.num_workers or min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        self._workers: list[WorkerHandle] = []
        self._waiting: dict[str, deque[Job]] = {kind: deque() for kind in ("list", "await", "call")}
        self._samples: list[Sample] = []
        self._num_jobs = self._num_wanted = self._num_calls = 0
        self._seconds_of_calls = self._looked = 0.0
        self.descriptions: list[Description] | None = None
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        self.failed: tuple[int, int, Failure] | None = None

    def start(self) -> None:
        """Start the first worker, if there is none, without waiting for it."""
        if not self._workers:
            self._start_worker()

    def load(self) -> list[Description]:
        """Return what a worker found out about each function, after loading them.

        Raises:
            ConfigError: A function cannot be loaded or called.
        """
        self.start()
        while self.descriptions is None:
            self._hear(_SECONDS_BETWEEN_LOOKS)
            self._check_deadlines()
        return self.descriptions

    def submit(self, samples: Sequence[Sample], mine: Sequence[int], with_lists: bool) -> None:
        """Begin to score samples; `advance` goes on with it.

        Args:
            samples: The samples of all ranks.
            mine: The indices of those for which these workers call functions of single samples.
            with_lists: Whether they also call functions of whole lists, for all samples.

        Raises:
            ConfigError: A function cannot be loaded or called.
        """
        described = list(enumerate(self.load()))
        self._samples, self.outcomes, self.failed = list(samples), {}, None
        plain = [index for index, each in described if each.form != "list" and not each.is_async]
        awaited = [index for index, each in described if each.form != "list" and each.is_async]
        lists = [index for index, each in described if each.form == "list" and with_lists and samples]
        for index in lists:
            self._wait("list", [index], list(range(len(samples))))
        for sample in mine:
            for index in awaited:
                self._wait("await", [index], [sample])
            if plain:
                self._wait("call", list(plain), [sample])
        self._num_wanted = len(lists) * len(samples) + (len(plain) + len(awaited)) * len(mine)

    def advance(self, seconds: float) -> bool:
        """Run calls for at most so many seconds; return whether all are done, or a failure ends the run.

        Raises:
            ConfigError: A new worker cannot load a function.
        """
        until = time.monotonic() + seconds
        while self.failed is None and len(self.outcomes) < self._num_wanted:
            self._send_jobs()
            self._start_more()
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._hear(min(left, _SECONDS_BETWEEN_LOOKS))
            self._check_deadlines()
        if self.failed is not None:
            self.abandon()
        return True

    def abandon(self) -> None:
        """Drop all work, and kill the workers that have some."""
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

    def _wait(self, kind: str, functions: list[int], samples: list[int]) -> None:
        self._num_jobs += 1
        self._waiting[kind].append(Job(self._num_jobs, kind, functions, samples))

    def _start_worker(self) -> None:
        worker = WorkerHandle(ChildProcess(WORKER_MODULE, dumps=dumps), time.monotonic())
        worker.process.prepare(self._settings.memory_limit_mb)
        worker.process.send("load", self._functions, self._settings.timeout_seconds)
        self._workers.append(worker)

    def _start_more(self) -> None:
        """Start the workers for which there is work."""
        waiting = sum(map(len, self._waiting.values()))
        free = min(self._most - len(self._workers), waiting)
        if free <= 0:
            return
        ready = [worker for worker in self._workers if worker.is_ready]
        if not self._workers or self._waiting["list"] and len(ready) == len(self._workers):
            self._start_worker()
        elif ready and waiting * self._seconds_per_call(ready) / len(self._workers) > _WORTH_A_WORKER_SECONDS:
            for _ in range(free):
                self._start_worker()

    def _seconds_per_call(self, ready: Sequence[WorkerHandle]) -> float:
        now = time.monotonic()
        longest = max((now - job.since for worker in ready if (job := worker.oldest) is not None), default=0.0)
        return max(longest, self._seconds_of_calls / max(self._num_calls, 1))

    def _send_jobs(self) -> None:
        are_short = self._num_calls > 0 and self._seconds_of_calls / self._num_calls < _SHORT_SECONDS
        most = {"list": 1, "await": self._settings.concurrency, "call": _AHEAD_IF_SHORT if are_short else _AHEAD}
        for worker in sorted(self._workers, key=lambda worker: len(worker.jobs)):
            for kind, waiting in self._waiting.items():
                while waiting and worker.takes(kind, 1 if waiting[0].attempts else most[kind]):
                    worker.send(waiting.popleft(), self._samples)

    def _hear(self, seconds: float) -> None:
        """Wait for messages for at most so many seconds, and take those that arrived."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                events = selectors.EVENT_WRITE if worker.process.wants_to_write else 0
                selector.register(worker.process.socket, selectors.EVENT_READ | events, worker)
            heard: list[WorkerHandle] = [key.data for key, _ in selector.select(seconds)]
        for worker in heard:
            worker.process.flush()
            for message in worker.process.receive():
                self._take(worker, *message)
        if time.monotonic() - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            for worker in self._workers:
                worker.process.poll()
        for worker in [worker for worker in self._workers if worker.process.has_ended]:
            self._take_end(worker)
        if heard and self._num_wanted:
            log.report_progress(len(self.outcomes), self._num_wanted, "rewards")

    def _take(self, worker: WorkerHandle, kind: str, *parts: Any) -> None:
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
        self._note(job, function, outcomes)
        job.functions.remove(function)
        if not job.functions:
            del worker.jobs[number]
        if job.kind == "call" and (following := worker.oldest) is not None:
            following.since = now

    def _note(self, job: Job, function: int, outcomes: Sequence[Outcome]) -> None:
        """Keep the outcomes of a function, and the failure if it ends the run."""
        for sample, outcome in zip(job.samples, outcomes, strict=True):
            self.outcomes[function, sample] = outcome
            failure = outcome.failure
            if failure is not None and self.failed is None and _policy(self._settings, failure) == "error":
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
                        "the import of a function's file must end"
                    )
                continue
            if worker.is_late(limit):
                oldest = worker.oldest
                call = worker.call()
                if call is None and oldest is not None and oldest.kind != "await":
                    call = oldest, oldest.functions[0]
                self._end(worker, call, Failure("timeout", f"took longer than {limit:g} seconds"))

    def _take_end(self, worker: WorkerHandle) -> None:
        """Take down which call ended a worker, and send its other calls again.

        If a coroutine closed the socket, another one may run by now.
        """
        is_async = (oldest := worker.oldest) is not None and oldest.kind == "await"
        marked = worker.call() if not is_async or worker.process.has_exited() else None
        if not worker.is_ready:
            how = worker.process.end()
            self._workers.remove(worker)
            self.abandon()
            raise ConfigError(f"reward.functions: a worker process {how} while it loaded them; see its output above")
        self._end(worker, marked, None)

    def _end(self, worker: WorkerHandle, call: tuple[Job, int] | None, failure: Failure | None) -> None:
        """Kill a worker.

        Args:
            worker: The worker.
            call: The job and the function of the call that fails; all other calls are made again. None: it is not
                known which of them it is, so that each is made again alone.
            failure: Why the call fails. None: it ended its worker process.
        """
        calls = [] if call is None else [call]
        if call is None:
            for job in worker.jobs.values():
                job.attempts += 1
                if job.attempts >= _MOST_ATTEMPTS:
                    calls.append((job, job.functions[0]))
        how = worker.process.end()
        self._workers.remove(worker)
        for job, function in calls:
            job.functions.remove(function)
            outcome = Outcome(None, {}, failure or Failure("error", f"ended its worker process, which {how}"))
            self._note(job, function, [outcome] * len(job.samples))
        for job in reversed([job for job in worker.jobs.values() if job.functions]):
            self._waiting[job.kind].appendleft(job)


def _policy(settings: RewardConfig, failure: Failure) -> str:
    return settings.on_timeout if failure.kind == "timeout" else settings.on_error

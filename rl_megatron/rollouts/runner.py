"""`RolloutRunner`: runs a rollout worker for many tasks at the same time. Rank 0 gets the trajectories."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rl_megatron import log
from rl_megatron.config.errors import ConfigError, RunFailed, describe_error
from rl_megatron.config.loading.import_strings import describe_user_error
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import Completion, EngineFailed, Request, RolloutEngine, Sampling
from rl_megatron.rewards.scorer import RewardFailed
from rl_megatron.rollouts.client import Answer, RolloutClient
from rl_megatron.rollouts.gateway.server import Gateway
from rl_megatron.rollouts.history import OnRewrite
from rl_megatron.rollouts.hosts import HostLost
from rl_megatron.rollouts.trajectory import TokenLimits, Trajectory, check_values
from rl_megatron.rollouts.worker import RolloutWorker, completion
from rl_megatron.timing import phase
from rl_megatron.topology.rank_zero_loop import RankZeroLoop
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.loop import Closes
from rl_megatron.training.metrics import NonFiniteLoss

_T = TypeVar("_T")
_RETRY_SEEDS = 1 << 32  # the difference between the seeds of two attempts
# The most retries of an attempt whose process ended: because of another attempt's call, and for an unknown reason.
# Usually that other attempt fails because of its call, so retries of the first kind come to an end.
_MOST_LOSSES, _MOST_UNEXPLAINED_LOSSES = 1000, 10


class RolloutFailed(RunFailed):
    """A task failed in all its attempts, and `rollout.on_failure` ends the run."""


class WorkerLeft(RuntimeError):
    """A rollout worker raised an exception that would have ended more than its attempt."""


# Errors of rollouts on rank 0 that every rank raises unchanged.
ROLLOUT_ERRORS = (RolloutFailed, RewardFailed, EngineFailed, NonFiniteLoss, ConfigError)


@dataclass(frozen=True)
class RolloutRules:
    """The limits of tasks, and the handling of failures.

    Attributes:
        on_rewrite: What happens if a chat template changes earlier messages; see `ChatHistory`.
        concurrency: The most tasks that run at the same time.
        retries: How often a task that fails is tried again.
        timeout_seconds: The longest time of an attempt, without its waits for the engine; None for no limit.
        fails_run: Whether a task that has failed in all attempts ends the run.
        seconds_to_end: How long an attempt may take to end when it is cancelled.
    """

    limits: TokenLimits
    on_rewrite: OnRewrite = "branch"
    concurrency: int = 4096
    retries: int = 0
    timeout_seconds: float | None = None
    fails_run: bool = True
    seconds_to_end: float = 5.0


@dataclass(frozen=True)
class RolloutTask:
    """A prompt for which a worker makes a trajectory.

    Attributes:
        name: The name of the task, unique within a draw.
        seed: The seed of its first request.
    """

    name: str
    prompt: EncodedPrompt
    seed: int


@dataclass(frozen=True)
class TaskResult:
    """The outcome of a task: its trajectory, or why it failed, and how often it was tried."""

    task: RolloutTask
    trajectory: Trajectory | None
    failure: str | None = None
    attempts: int = 1


class RolloutRunner:
    """The runner of a rollout worker for many tasks, on an asyncio loop in a thread of rank 0.

    Every rank calls `run`, and takes part in the rounds of completions.

    Attributes:
        makes_turns: Whether trajectories may have several turns or sequences, or rewards of an environment.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        rules: RolloutRules,
        tokenizer: Tokenizer,
        ranks: Ranks,
        collective_timeout: float,
        owned: Sequence[Closes] = (),
        gateway: Gateway | None = None,
    ):
        """Start the thread.

        Args:
            worker: The worker.
            rules: How tasks run.
            tokenizer: The run's tokenizer.
            ranks: The policy's ranks.
            collective_timeout: Seconds after which a collective fails.
            owned: Objects that only the worker needs, such as processes. They are closed with the runner.
            gateway: The gateway that agents send requests to. It is closed with the runner.
        """
        self._gateway, self._owned = gateway, owned
        self._worker, self.rules, self._tokenizer, self.ranks = worker, rules, tokenizer, ranks
        self.makes_turns = worker is not completion
        self.loop = RankZeroLoop(ranks, collective_timeout, "rollout workers", ROLLOUT_ERRORS)

    def run(self, tasks: Sequence[RolloutTask], engine: RolloutEngine, sampling: Sampling) -> list[TaskResult]:
        """Return the result of each task, in order. Collective; other ranks than 0 pass no tasks and get no results."""
        rounds = Rounds(partial(self.run_attempts, sampling), self.rules.concurrency)
        requests: list[Request] = []  # of a round, on rank 0
        results: list[TaskResult] = []

        async def begin_round() -> bool:
            requests[:] = await rounds.wait_for_requests()
            return bool(requests)

        async def end() -> None:
            results[:] = rounds.collect_results()

        try:
            if self.ranks.leads:
                self.loop.wait(rounds.begin(tasks))
            while self._wait_for_round(begin_round):
                completions = engine.complete(requests)
                if self.ranks.leads:
                    self.loop.wait(rounds.answer(completions))
            self.loop.run_for_all_ranks(end)
            return results
        finally:
            if self.ranks.leads:
                self.loop.wait(rounds.cancel())

    def close(self) -> None:
        """End the gateway, the thread, and the objects that the worker needs."""
        try:
            if self._gateway is not None and self.ranks.leads:
                self.loop.wait(self._gateway.close())
            self.loop.close()
        finally:
            for resource in self._owned:
                resource.close()

    def _wait_for_round(self, begin_round: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        with phase("environment"):
            return self.loop.run_for_all_ranks(begin_round)

    async def run_attempts(self, sampling: Sampling, task: RolloutTask, answer: Answer) -> TaskResult:
        """Run a task on the loop until an attempt succeeds or none is left.

        An attempt that lost its process is repeated without being counted, up to a limit. After the last attempt,
        raise RolloutFailed if `rules.fails_run`.
        """
        rules, failed, failure = self.rules, 0, ""
        losses = {True: _MOST_LOSSES, False: _MOST_UNEXPLAINED_LOSSES}
        seconds = rules.timeout_seconds if self.makes_turns else None  # `completion` waits for the engine only
        tries = 0
        while failed <= rules.retries:
            name = task.name if tries == 0 else f"{task.name}r{tries}"
            client = RolloutClient(
                name, task.seed + tries * _RETRY_SEEDS, task.prompt, sampling, self._tokenizer, rules.limits,
                answer, rules.on_rewrite, self._gateway,
            )  # fmt: skip
            tries += 1
            try:
                trajectory = await run_within_limit(
                    self._make_trajectory(client, sampling), seconds, client, seconds_to_end=rules.seconds_to_end
                )
                return TaskResult(task, trajectory, attempts=tries)
            except (EngineFailed, NonFiniteLoss, ConfigError, asyncio.CancelledError):
                raise
            except Exception as error:  # whatever the worker, an environment or a tool raises
                failure = (
                    f"trajectory {name} ({task.prompt.record.location}): the rollout worker "
                    f"{describe_user_error(error)}"
                )
                if isinstance(error, HostLost) and losses[error.by_another_call] > 0:
                    losses[error.by_another_call] -= 1
                    log.LOGGER.warning("%s; the trajectory begins again, which does not count as an attempt", failure)
                    continue
                failed += 1
                log.LOGGER.warning("%s; attempt %d of %d", failure, failed, rules.retries + 1)
        if rules.fails_run:
            raise RolloutFailed(failure)
        return TaskResult(task, None, failure, tries)

    async def _make_trajectory(self, client: RolloutClient, sampling: Sampling) -> Trajectory:
        """Run the worker; return its trajectory after checking that the sampled tokens are those of the engine."""
        try:
            trajectories = list(await self._worker(client, client.prompt.record.values, sampling))
        except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
            raise WorkerLeft(f"it raised {describe_error(error)}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise WorkerLeft("a task that it awaited was cancelled") from error
        finally:
            client.close()
        if len(trajectories) != 1 or not isinstance(trajectories[0], Trajectory) or not trajectories[0].turns:
            kinds = ", ".join(type(trajectory).__name__ for trajectory in trajectories)
            raise ValueError(f"it returned [{kinds}]; it must return a list with one Trajectory that has a completion")
        client.check(trajectories[0])
        return check_values(trajectories[0])


async def run_within_limit(
    work: Coroutine[Any, Any, _T],
    seconds: float | None,
    client: RolloutClient,
    key: str = "rollout.timeout_seconds",
    seconds_to_end: float = 5.0,
) -> _T:
    """Return the result of a coroutine; if it takes longer than `seconds`, cancel it and raise TimeoutError.

    Args:
        work: The coroutine.
        seconds: The longest time that it may take, without the time in which the client waits for the engine.
        client: The client.
        key: The configuration key of this limit, for the message.
        seconds_to_end: How long it may take to end after it is cancelled.
    """
    if seconds is None:
        return await work
    task, began, of_engine = asyncio.ensure_future(work), time.monotonic(), client.seconds_of_engine
    try:
        while not task.done():
            left = seconds - (time.monotonic() - began - (client.seconds_of_engine - of_engine))
            if left <= 0:
                raise TimeoutError(f"took longer than {key}={seconds:g}")
            await asyncio.wait({task}, timeout=left)
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            _, running = await asyncio.wait({task}, timeout=seconds_to_end)
            if running:
                log.LOGGER.warning("trajectory %s: the rollout worker continues although it was cancelled", client.name)


class Rounds:
    """The tasks of one draw, which run on an asyncio loop and send requests to the rollout engine in rounds.

    A round has the requests of all trajectories that still run: it begins when each of them waits for the engine. The
    engine's batches thus do not depend on how long environments and tools take, so equal runs get equal results.
    All methods run on the loop.
    """

    def __init__(self, run: Callable[[RolloutTask, Answer], Coroutine[Any, Any, TaskResult]], most: int):
        """Start without tasks. `run` runs one task; at most `most` tasks run at the same time."""
        self._run, self._most = run, most
        self._running: dict[int, int] = {}  # number of a running task → how many of its requests wait
        self._waiting: dict[str, tuple[int, Request, asyncio.Future[Completion]]] = {}
        self._work: list[asyncio.Task[TaskResult]] = []
        self._num_unstarted = 0
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    async def begin(self, tasks: Sequence[RolloutTask]) -> None:
        running = asyncio.Semaphore(self._most)
        self._num_unstarted = len(tasks)
        self._work = [
            asyncio.get_running_loop().create_task(self._run_task(running, number, task))
            for number, task in enumerate(tasks)
        ]

    async def wait_for_requests(self) -> list[Request]:
        """Wait for a round, and return its requests in the order of their tasks; none if all tasks have ended.

        Raise the error of a task that ends the run.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if all(work.done() for work in self._work):
                return []
            if self._all_wait():
                ordered = sorted(self._waiting.values(), key=lambda entry: entry[0])
                return [request for _, request, _ in ordered]
            self._changed.clear()
            await self._changed.wait()

    async def answer(self, completions: Sequence[Completion]) -> None:
        """Give the completions of a round to the tasks that wait for them."""
        for answer in completions:
            waiting = self._waiting.get(answer.request_id)
            if waiting is not None and not waiting[2].done():  # otherwise its task has ended meanwhile
                waiting[2].set_result(answer)

    def collect_results(self) -> list[TaskResult]:
        """Return the results of all tasks, in their order."""
        return [work.result() for work in self._work]

    async def cancel(self) -> None:
        for work in self._work:
            work.cancel()

    def _all_wait(self) -> bool:
        """Return whether every task that can run waits for the engine."""
        is_full = self._num_unstarted == 0 or len(self._running) == self._most
        return is_full and bool(self._running) and all(self._running.values())

    async def _run_task(self, running: asyncio.Semaphore, number: int, task: RolloutTask) -> TaskResult:
        async with running:
            self._running[number], self._num_unstarted = 0, self._num_unstarted - 1
            try:
                return await self._run(task, partial(self._ask, number))
            except Exception as error:  # it ends the run, so other tasks need not continue
                self._failure = self._failure or error
                raise
            finally:
                del self._running[number]
                self._changed.set()

    def _ask(self, number: int, request: Request) -> asyncio.Future[Completion]:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._running[number] += 1  # comes first, because it raises KeyError if the task has ended
        self._waiting[request.request_id] = number, request, future
        future.add_done_callback(partial(self._forget_request, number, request.request_id))
        self._changed.set()
        return future

    def _forget_request(self, number: int, request_id: str, _: asyncio.Future[Completion]) -> None:
        del self._waiting[request_id]
        if number in self._running:  # otherwise its task has ended
            self._running[number] -= 1

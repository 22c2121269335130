"""`RolloutRunner`: lets a rollout worker make the trajectories of many tasks. Rank 0 gets them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from rl_megatron import log
from rl_megatron.config.errors import ConfigError, RunFailed, describe_error
from rl_megatron.config.loading.import_strings import raised
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import Completion, EngineFailed, Request, RolloutEngine, Sampling
from rl_megatron.rewards.scorer import RewardFailed
from rl_megatron.rollouts.client import Answer, RolloutClient
from rl_megatron.rollouts.gateway.server import Gateway
from rl_megatron.rollouts.history import OnRewrite
from rl_megatron.rollouts.hosts import HostLost
from rl_megatron.rollouts.limits import TokenLimits
from rl_megatron.rollouts.rounds import RolloutTask, Rounds, TaskResult
from rl_megatron.rollouts.trajectory import Trajectory, checked_values
from rl_megatron.rollouts.worker import RolloutWorker, completion
from rl_megatron.timing import phase
from rl_megatron.topology.rank_zero_loop import RankZeroLoop
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.metrics import NonFiniteLoss

_T = TypeVar("_T")
_RETRY_SEEDS = 1 << 32  # the distance of the seeds of two attempts
# How often an attempt is made again whose process another call has ended, and how often if nobody knows what ended it.
# Each of the first kind has a cause, which usually is a failed attempt of another task, so that it comes to an end.
_MOST_LOSSES, _MOST_UNEXPLAINED_LOSSES = 1000, 10


class Closes(Protocol):
    """Something that is closed when a runner is."""

    def close(self) -> None:
        """End what it has started."""
        ...


class RolloutFailed(RunFailed):
    """A task failed in all its attempts, and the configuration says that the run ends then."""


class WorkerLeft(RuntimeError):
    """A rollout worker ended in a way that would end more than its attempt."""


# Errors of rollouts on rank 0 that every rank raises as they are.
ROLLOUT_ERRORS = (RolloutFailed, RewardFailed, EngineFailed, NonFiniteLoss, ConfigError)


@dataclass(frozen=True)
class RolloutRules:
    """How tasks run.

    Attributes:
        limits: The limits of a trajectory's tokens.
        on_rewrite: What happens if a chat template rewrites the past.
        concurrency: The most tasks that run at the same time.
        retries: How often a task that fails is tried again.
        timeout_seconds: The longest time of an attempt, without the time of the engine; None for no limit.
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


class RolloutRunner:
    """Runs a rollout worker for many tasks. The worker runs on rank 0, on an asyncio loop in a thread of its own.

    Every rank calls `run`, and takes part in the rounds of completions.

    Attributes:
        rules: How tasks run.
        loop: The loop.
        ranks: The policy's ranks.
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
            ranks: The exchange among the policy's ranks.
            collective_timeout: Seconds after which a collective fails.
            owned: What the worker needs and nobody else, such as processes. It is closed with the runner.
            gateway: What agents send requests to; `close` ends it. None if there is none.
        """
        self._gateway, self._owned = gateway, owned
        self._worker, self.rules, self._tokenizer, self.ranks = worker, rules, tokenizer, ranks
        self.loop = RankZeroLoop(ranks, collective_timeout, "rollout workers", ROLLOUT_ERRORS)

    @property
    def makes_turns(self) -> bool:
        """Return whether trajectories may have several turns or sequences, or rewards of an environment."""
        return self._worker is not completion

    def run(self, tasks: Sequence[RolloutTask], engine: RolloutEngine, sampling: Sampling) -> list[TaskResult]:
        """Return the result of each task, in order, on rank 0, and none on other ranks. Collective.

        Args:
            tasks: The tasks; only rank 0 needs them.
            engine: The engine.
            sampling: How completions are sampled if the worker does not say so.

        Raises:
            RolloutFailed: A task failed in all its attempts, and the rules say that the run ends then.
            EngineFailed: The engine cannot go on.
        """
        rounds = Rounds(partial(self.attempts, sampling), self.rules.concurrency)
        requests: list[Request] = []  # of a round, on rank 0
        results: list[TaskResult] = []

        async def begins_round() -> bool:
            requests[:] = await rounds.requests()
            return bool(requests)

        async def end() -> None:
            results[:] = rounds.results()

        try:
            if self.ranks.leads:
                self.loop.wait(_begin(rounds, tasks))
            while self._waited(begins_round):
                completions = engine.complete(requests)
                if self.ranks.leads:
                    self.loop.wait(_answer(rounds, completions))
            self.loop.on_all_ranks(end)
            return results
        finally:
            if self.ranks.leads:
                self.loop.wait(_cancel(rounds))

    def close(self) -> None:
        """End the gateway, the thread, and what the worker needs."""
        try:
            if self._gateway is not None and self.ranks.leads:
                self.loop.wait(self._gateway.close())
            self.loop.close()
        finally:
            for each in self._owned:
                each.close()

    def _waited(self, begins_round: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        with phase("environment"):
            return self.loop.on_all_ranks(begins_round)

    async def attempts(self, sampling: Sampling, task: RolloutTask, answer: Answer) -> TaskResult:
        """Run a task on the loop until an attempt succeeds or there are no more.

        An attempt whose process was lost does not count.

        Args:
            sampling: How completions are sampled if the worker does not say so.
            task: The task.
            answer: Returns the completion of a request.

        Raises:
            RolloutFailed: All attempts failed, and the rules say that the run ends then.
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
                made = await within_limit(
                    self._trajectories(client, sampling), seconds, client, seconds_to_end=rules.seconds_to_end
                )
                return TaskResult(made, attempts=tries)
            except (EngineFailed, NonFiniteLoss, ConfigError, asyncio.CancelledError):
                raise
            except Exception as error:  # whatever the worker, an environment or a tool raises
                failure = f"trajectory {name} ({task.prompt.record.location}): the rollout worker {raised(error)}"
                if isinstance(error, HostLost) and losses[error.by_another_call] > 0:
                    losses[error.by_another_call] -= 1
                    log.LOGGER.warning("%s; it begins again, which does not count as an attempt", failure)
                    continue
                failed += 1
                log.LOGGER.warning("%s; attempt %d of %d", failure, failed, rules.retries + 1)
        if rules.fails_run:
            raise RolloutFailed(failure)
        return TaskResult((), failure, tries)

    async def _trajectories(self, client: RolloutClient, sampling: Sampling) -> list[Trajectory]:
        """Return what the worker makes with a client, whose tokens are those of the engine."""
        try:
            made = list(await self._worker(client, client.prompt.record.values, sampling))
        except (SystemExit, KeyboardInterrupt) as error:  # either would end the loop
            raise WorkerLeft(f"it raised {describe_error(error)}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise WorkerLeft("a task that it awaited was cancelled") from error
        finally:
            client.close()
        if len(made) != 1 or not isinstance(made[0], Trajectory) or not made[0].turns:
            kinds = ", ".join(type(each).__name__ for each in made)
            raise ValueError(f"it returned [{kinds}], and a list with one Trajectory that has a completion is wanted")
        client.check(made[0])
        return [checked_values(made[0])]


async def within_limit(
    work: Coroutine[Any, Any, _T],
    seconds: float | None,
    client: RolloutClient,
    key: str = "rollout.timeout_seconds",
    seconds_to_end: float = 5.0,
) -> _T:
    """Return what a coroutine returns.

    Args:
        work: The coroutine.
        seconds: The longest time that it may take, without the time in which the client waits for the engine. None for
            no limit.
        client: The client.
        key: The configuration key of this time, for the message.
        seconds_to_end: How long it may take to end when it is cancelled.

    Raises:
        TimeoutError: It takes longer, and is cancelled.
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
                log.LOGGER.warning("trajectory %s: the rollout worker goes on although it was cancelled", client.name)


async def _begin(rounds: Rounds, tasks: Sequence[RolloutTask]) -> None:
    rounds.begin(tasks)


async def _answer(rounds: Rounds, completions: Sequence[Completion]) -> None:
    rounds.answer(completions)


async def _cancel(rounds: Rounds) -> None:
    rounds.cancel()

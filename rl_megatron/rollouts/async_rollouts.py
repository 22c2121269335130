"""`AsyncRollouts`: produces and scores groups of trajectories on rank 0 while all ranks train."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rl_megatron.generation.interfaces import Completion, EngineLost, Request, Sampling
from rl_megatron.generation.synced_engine import SyncedEngine
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.rollouts.group_queue import NOT_IN_TIME, TOO_OLD, GroupQueue, QueueRules
from rl_megatron.rollouts.record import LoggedGroup, LoggedStep
from rl_megatron.rollouts.runner import RolloutTask, TaskResult
from rl_megatron.rollouts.scored import ScoredRollouts, Scores
from rl_megatron.timing import phase


@dataclass(frozen=True)
class Group:
    """A complete group.

    Attributes:
        number: Its position in the stream of prompts.
        ages: The age of each trajectory, in steps: that of its oldest token.
    """

    number: int
    results: Sequence[TaskResult]
    scores: Scores
    ages: Sequence[int]

    @property
    def num_partial(self) -> int:
        """Return how many of its trajectories were sampled with several versions of the weights."""
        return sum(len(_collect_versions(result)) > 1 for result in self.results)

    @property
    def versions(self) -> set[int]:
        """Return the versions of the weights with which its tokens were sampled."""
        return set().union(*(_collect_versions(result) for result in self.results))


@dataclass(frozen=True)
class StepGroups:
    """The groups that a step gets, and the events since the last step. Ranks other than 0 get no groups.

    Attributes:
        used: The groups that the step learns from, in the order of the stream.
        equal: The groups that were dropped since the last step because all their rewards are equal.
        dropped: All groups that were dropped since the last step, with the reason.
        num_refilled: How many groups were started to replace dropped ones.
        num_running: How many groups still run.
        num_ready: How many complete groups wait for later steps.
        engine_idle: The share of the time since the last step in which the engine had no request.
        trainer_idle: The share of this time in which training waited for groups; None for the first step.
    """

    used: Sequence[Group] = ()
    equal: Sequence[Group] = ()
    dropped: Mapping[int, str] = field(default_factory=dict)
    num_refilled: int = 0
    num_running: int = 0
    num_ready: int = 0
    engine_idle: float = 0.0
    trainer_idle: float | None = None

    def compute_metrics(self) -> dict[str, float]:
        """Return the metrics of the queue; call this on rank 0."""
        ages = torch.tensor([age for group in self.used for age in group.ages], dtype=torch.float32)
        reasons = list(self.dropped.values())
        return {
            "trajectory_age_mean": ages.mean().item(),
            "trajectory_age_max": ages.max().item(),
            "partial_trajectories": float(sum(group.num_partial for group in self.used)),
            "dropped_groups": float(len(reasons)),
            "dropped_groups_too_old": float(reasons.count(TOO_OLD)),
            "dropped_groups_not_in_time": float(reasons.count(NOT_IN_TIME)),
            "refilled_groups": float(self.num_refilled),
            "running_groups": float(self.num_running),
            "ready_groups": float(self.num_ready),
            "engine_idle": self.engine_idle,
            **({} if self.trainer_idle is None else {"trainer_idle": self.trainer_idle}),
        }

    def build_log_entry(self, step: int, metrics: Mapping[str, float]) -> LoggedStep:
        """Return the step's entry of the rollout log, with these metrics."""
        used = []
        for group in self.used:
            versions = sorted(group.versions)
            location = group.results[0].task.prompt.problem.location or ""
            used.append(LoggedGroup(group.number, location, list(group.ages), [*versions[:1], *versions[-1:]]))
        return LoggedStep(step, used, dict(self.dropped), dict(metrics))


class AsyncRollouts:
    """The running groups of a stage, on the event loop of rollout workers. Rank 0 owns them.

    All methods except `close` are collective. A request is sent to the engine immediately, without waiting for others.
    """

    def __init__(
        self,
        rollouts: ScoredRollouts,
        scorer: Scorer,
        rules: QueueRules,
        tasks_at: Callable[[int], list[RolloutTask]],
        engine: SyncedEngine,
        weight_version: Callable[[], int],
        sampling: Sampling,
        waits_for_requests: bool,
    ):
        """Start nothing before the first `take`.

        Args:
            rollouts: Makes and scores trajectories. Its runner has the loop.
            scorer: A scorer of a single rank, which `close` closes.
            rules: The limits on the number of groups and on their ages.
            tasks_at: Returns the tasks of the group at a position of the stream of prompts.
            engine: The engine, whose syncs this object observes.
            weight_version: Returns the version of the policy's weights.
            sampling: How completions are sampled if the worker does not choose.
            waits_for_requests: Whether a weight sync waits until the engine has no request.
        """
        self._rollouts, self._scorer, self._tasks_at, self._engine = rollouts, scorer, tasks_at, engine
        self._weight_version, self._sampling, self._waits = weight_version, sampling, waits_for_requests
        self._ranks, self._loop = rollouts.runner.ranks, rollouts.runner.loop
        self.queue = GroupQueue(rules)
        self._newest: tuple[int, int] | None = None  # the newest step, and the version of the weights it began with
        self._taken_at: float | None = None
        engine.observe_syncs(self._close_before_sync, self._open_after_sync)
        # Everything below is used on rank 0's loop only.
        self._is_open = asyncio.Event()  # whether requests may be sent
        self._changed = asyncio.Event()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._ready: dict[int, Group] = {}
        self._equal: list[Group] = []
        self._taken = StepGroups()
        self._to_score: list[tuple[int, list[TaskResult]]] = []
        self._scoring: asyncio.Task[None] | None = None
        self._running_tasks = asyncio.Semaphore(rollouts.runner.rules.concurrency)
        self._step_of_version: dict[int, int] = {}
        self._failure: BaseException | None = None
        self._num_requests, self._is_lost = 0, False
        self._idle = _Idle()
        self._thread = ThreadPoolExecutor(1, "rewards") if self._ranks.leads else None

    def take(self, step: int, prompts: list[list[int]]) -> StepGroups:
        """Wait for the groups of a step, and return them. Nothing is generated before the first call.

        The engine's logprobs are checked on `prompts`.
        """
        self._newest = step, self._weight_version()
        self._engine.prepare(prompts)
        began = time.monotonic()
        while not self._try_take():
            self._engine.prepare(prompts)  # start the lost engine again
        since, self._taken_at = self._taken_at, time.monotonic()
        idle = None if since is None else (self._taken_at - began) / max(self._taken_at - since, 1e-9)
        groups, self._taken = self._taken, StepGroups()
        return replace(groups, trainer_idle=idle)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the queue, the same on all ranks."""
        if self._newest is None:
            return self.queue.state_dict()
        return self._loop.run_for_all_ranks(self._read_state)

    def close(self) -> None:
        """End all groups that run. This is not collective."""
        if self._ranks.leads:
            self._loop.wait(self._cancel_tasks())
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._scorer.close()

    def _try_take(self) -> bool:
        with phase("wait"):
            return self._loop.run_for_all_ranks(self._take_groups)

    def _close_before_sync(self) -> None:
        """Stop sending requests; if a weight sync has to wait for running requests, wait until they end."""
        served, version = self._engine.served, self._weight_version()
        if self._newest is not None and (served is None or served.version != version):
            self._loop.run_for_all_ranks(lambda: self._close(version, self._find_step(version)))

    def _open_after_sync(self) -> None:
        """Continue with the engine's new weights."""
        if self._newest is not None:
            version = self._weight_version()
            self._loop.run_for_all_ranks(lambda: self._open(version, self._find_step(version)))

    def _find_step(self, version: int) -> int:
        """Return the step that begins with this version of the policy's weights."""
        assert self._newest is not None  # nothing starts before the first step
        step, its_version = self._newest
        return step if version == its_version else step + 1

    # --- on rank 0's loop ---

    async def _close(self, version: int, step: int) -> None:
        # Running requests may sample with the new weights before the sync returns, so record the weights' step now.
        self._step_of_version[version] = step
        self._is_open.clear()
        while self._waits and self._num_requests:
            await self._wait_for_a_change()

    async def _open(self, version: int, step: int) -> None:
        self._step_of_version[version] = step
        self.queue.note_weights(step)
        self._is_lost = False
        self._is_open.set()
        self._start_groups()

    async def _read_state(self) -> dict[str, object]:
        return self.queue.state_dict()

    async def _take_groups(self) -> bool:
        """Take the groups of the next step; return False if the engine was lost meanwhile."""
        while not self.queue.is_ready():
            if self._failure is not None:
                raise self._failure
            if self._is_lost:
                return False
            await self._wait_for_a_change()
        ended = self.queue.take()
        used = [self._add_ages(self._ready.pop(number)) for number in ended.used]
        for number in ended.dropped:
            self._ready.pop(number, None)
        for number in ended.running:
            self._running.pop(number).cancel()
        equal, self._equal = self._equal, []
        self._taken = StepGroups(
            used, equal, ended.dropped, ended.num_refilled, self.queue.num_running, self.queue.num_ready,
            self._idle.share_since_last(self._num_requests),
        )  # fmt: skip
        self._start_groups()
        return True

    async def _wait_for_a_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _cancel_tasks(self) -> None:
        tasks = [*self._running.values(), *([] if self._scoring is None else [self._scoring])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_groups(self) -> None:
        while self._is_open.is_set() and (number := self.queue.start()) is not None:
            self._running[number] = asyncio.get_running_loop().create_task(self._run(number))

    async def _run(self, number: int) -> None:
        """Make the trajectories of a group, and queue them for the scorer."""
        try:
            async with asyncio.TaskGroup() as together:
                work = [together.create_task(self._attempt(task)) for task in self._tasks_at(number)]
            self._to_score.append((number, [attempts.result() for attempts in work]))
            if self._scoring is None:
                self._scoring = asyncio.get_running_loop().create_task(self._score())
        except BaseExceptionGroup as errors:
            self._fail(errors.exceptions[0])
        except Exception as error:
            self._fail(error)

    async def _attempt(self, task: RolloutTask) -> TaskResult:
        async with self._running_tasks:
            return await self._rollouts.runner.run_attempts(self._sampling, task, self._ask)

    async def _ask(self, request: Request) -> Completion:
        """Return the completion of a request; if the engine is lost, repeat the request on a new one."""
        while True:
            await self._is_open.wait()
            self._idle.note(self._num_requests)
            self._num_requests += 1
            try:
                return await self._engine.submit(request)
            except EngineLost:
                self._is_open.clear()
                self._is_lost = True
            finally:
                self._idle.note(self._num_requests)
                self._num_requests -= 1
                self._changed.set()

    async def _score(self) -> None:
        """Let a thread compute the scores of all groups whose trajectories are complete, and add the scores."""
        try:
            while self._to_score:
                waiting, self._to_score = self._to_score, []
                scores = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute_scores, waiting)
                for (number, results), group_scores in zip(waiting, scores, strict=True):
                    self._complete_group(number, results, group_scores)
                self._start_groups()
                self._changed.set()
        except Exception as error:
            self._fail(error)
        finally:
            self._scoring = None

    def _compute_scores(self, groups: Sequence[tuple[int, list[TaskResult]]]) -> list[Scores]:
        return [self._rollouts.score(results, self._scorer) for _, results in groups]

    def _complete_group(self, number: int, results: list[TaskResult], scores: Scores) -> None:
        if self._running.pop(number, None) is None:
            return  # the group was dropped while it was scored
        group = Group(number, results, replace(scores, samples=()), ())
        steps = [self._step_of_version[version] for result in results for version in _collect_versions(result)]
        # Masked trajectories are not compared: their reward 0 may differ from others, but they are not trained on.
        rewards = scores.rewards[self._rollouts.on_failure.samples_that_count(scores.succeeded, len(results))].tolist()
        differs = any(reward != rewards[0] for reward in rewards)
        # If all trajectories of a group failed, `steps` is empty, and the next step counts as the step of the group.
        if self.queue.complete(number, min(steps, default=self.queue.next_step), differs):
            self._ready[number] = group
        else:
            self._equal.append(group)

    def _add_ages(self, group: Group) -> Group:
        step = self.queue.next_step - 1
        ages = [
            step - min((self._step_of_version[version] for version in _collect_versions(result)), default=step)
            for result in group.results
        ]
        return replace(group, ages=ages)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._changed.set()


class _Idle:
    """A meter of the time in which the engine has no request."""

    def __init__(self) -> None:
        self._began = self._noted = time.monotonic()
        self._idle = 0.0

    def note(self, num_requests: int) -> None:
        """Record that the number of requests is about to change."""
        now = time.monotonic()
        if num_requests == 0:
            self._idle += now - self._noted
        self._noted = now

    def share_since_last(self, num_requests: int) -> float:
        """Return the share of the time since the last call in which the engine had no request."""
        self.note(num_requests)
        share = self._idle / max(self._noted - self._began, 1e-9)
        self._began, self._idle = self._noted, 0.0
        return share


def _collect_versions(result: TaskResult) -> set[int]:
    """Return the versions of the weights with which a trajectory was sampled."""
    turns = () if result.trajectory is None else result.trajectory.turns
    return {span.version for turn in turns for span in turn.completion.versions}

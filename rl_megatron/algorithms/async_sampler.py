"""`AsyncSampler`: the rollouts of a step in asynchronous training, where they are made while the policy trains."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rl_megatron import log
from rl_megatron.algorithms.async_pace import AsyncPace
from rl_megatron.algorithms.device_balance import DeviceBalance, engine_devices, num_training_nodes
from rl_megatron.algorithms.loop import Loop
from rl_megatron.algorithms.rollout import Sampler, add_data_sets, mixture_to_tell_apart, seed_of_batch
from rl_megatron.algorithms.rollout_record import RolloutRecord
from rl_megatron.algorithms.rollout_statistics import statistics
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.checkpoint.save import SaveFailed
from rl_megatron.config.algorithm_kinds import RolloutConfig
from rl_megatron.config.rollout import TrajectoryConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.sources import build_source
from rl_megatron.data.training_data import RolloutPrompts
from rl_megatron.generation.stage_sampling import stage_sampling
from rl_megatron.rewards.reward_metrics import RewardMetrics
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.rollouts.async_rollouts import AsyncRollouts, Group, StepGroups
from rl_megatron.rollouts.group_queue import NOT_IN_TIME, TOO_OLD, QueueRules
from rl_megatron.rollouts.rollout_log import LoggedGroup, LoggedStep, RolloutLog
from rl_megatron.rollouts.rounds import RolloutTask
from rl_megatron.rollouts.runner import ROLLOUT_ERRORS
from rl_megatron.rollouts.scored import Scored, Scores, tasks_of
from rl_megatron.topology.ranks import Ranks


def sampler_of(stage: Loop, algorithm: RolloutConfig) -> Sampler | AsyncSampler:
    """Return what makes the rollouts of a stage."""
    rollout = stage.config.rollout
    if rollout.is_asynchronous and rollout.replay is None:
        return AsyncSampler(stage, algorithm)
    return Sampler(stage, algorithm)


class AsyncSampler:
    """The sampler of a stage whose trajectories are made while the policy trains.

    Group n of the stream has the prompt and the seeds that a synchronous run gives to its place. Every step is written
    to a log before it is learned from. A run that is continued learns from the log as far as it goes, so that it trains
    on the same tokens again, and then makes the groups anew that were not complete.
    """

    def __init__(self, stage: Loop, algorithm: RolloutConfig):
        config = stage.config
        self._stage, self._engine = stage, stage.engine
        self._group_size, self._per_step = algorithm.samples_per_prompt, algorithm.prompts_per_step
        self._rounds, self._seed = algorithm.rounds_per_step, config.train.seed
        self._prompts = RolloutPrompts(config, algorithm, stage.tokenizer)
        stage.use_loader(self._prompts.loader)
        self._sampling = stage_sampling(config, stage.tokenizer, end_of_turn_ids=self._prompts.end_of_turn_ids)
        self._mixture = mixture_to_tell_apart(config, algorithm)
        of_all = replace(config.rollout, save_every=1, save_prompts=None)
        self._ranks = ranks = stage.policy.topology.ranks
        self._record = RolloutRecord(
            of_all, stage.rollout_files, stage.tokenizer, self._group_size, ranks,
            reward=config.reward if algorithm.reads_components else None, mixture=self._mixture,
        )  # fmt: skip
        self._log = RolloutLog(stage.rollout_files)
        self._logged = ranks.share(self._log.read)
        self._rollouts = AsyncRollouts(
            stage.rollouts, Scorer(config.reward, lambda: build_source(config).task(), Ranks()),
            queue_rules(config.rollout, algorithm, config.train.steps), self._tasks_at, self._engine.submit,
            self._sampling, ranks, waits_for_requests=not config.rollout.in_flight_weight_updates,
        )  # fmt: skip
        stage.keep("sampler", self)
        stage.close_at_end(self._rollouts)
        self._engine.observe_syncs(self._before_sync, self._after_sync)
        self._collected = 0, 0  # the newest step that was collected, and the version of its weights
        self._collected_at: float | None = None
        self._new: LoggedStep | None = None  # the step that is to be logged, on rank 0
        self._is_replayed = False
        self._store = TensorStore(config.rollout.max_host_bytes, config.rollout.disk_directory)
        self._balance = DeviceBalance()
        self._devices = {
            "trainer_devices": float(ranks.size),
            "engine_devices": float(engine_devices(config.generation, num_training_nodes(ranks.size))),
        }
        self._pace = AsyncPace(config.rollout.max_trajectory_age_steps, algorithm.prompts_per_step)
        self._num_steps = config.train.steps

    def collect(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Return (the rollouts that the step learns from, statistics of all rollouts since the step before).

        Raises:
            RolloutFailed, RewardFailed, EngineFailed, EngineMismatch: See `AsyncRollouts.take` and `SyncedEngine`.
        """
        self._collected = step, self._stage.policy.weight_version
        logged = self._logged.pop(step, None)
        self._is_replayed = logged is not None
        if logged is not None:
            return self._replayed(logged)
        self._rollouts.begin()
        prompts = [prompt.ids for prompt in self._prompts.loader.batch((step - 1) * self._rounds)]
        self._engine.ready(prompts)
        began_to_wait = time.monotonic()
        groups = self._rollouts.take(restore=lambda: self._engine.ready(prompts))
        ended, since = time.monotonic(), self._collected_at
        self._collected_at = ended
        idle = None if since is None else (ended - began_to_wait) / max(ended - since, 1e-9)
        rollouts, outcome = self._learned(groups, idle)
        if groups is not None:
            self._new = _logged(step, groups, outcome)
        self._balance.note(outcome)
        warnings = self._pace.note(outcome)
        said = self._balance.report() if step == self._num_steps else None
        if log.is_main_rank():
            for warning in warnings:
                log.LOGGER.warning("stage %s: %s", self._stage.name, warning)
            if said is not None:
                log.LOGGER.info("stage %s: %s", self._stage.name, said)
        return rollouts, outcome

    def keep(self, step: int, learned: Batch) -> None:
        """Write the rollouts of a step and its line of the log, if it was not replayed. Collective.

        Raises:
            SaveFailed: They cannot be written.
        """
        if self._is_replayed:
            return
        self._record.write(step, learned, self._stage.policy.weight_version)
        failure = self._ranks.try_on_rank0(self._append)
        if failure is not None:
            raise SaveFailed(f"the log of rollouts in {self._stage.rollout_files} cannot be written: {failure}")

    def _append(self) -> None:
        assert self._new is not None  # rank 0 has collected the step
        self._log.append(self._new)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups that are left, which checkpoints keep. Collective."""
        return {
            "queue": self._rollouts.state_dict(),
            "batches_skipped": self._stage.batches_skipped,
            "weight_version": self._stage.policy.weight_version,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. After a roll-back, the log ends there, and the groups since are left out."""
        self._stage.policy.model.version = state["weight_version"]  # the log goes on with the same numbers
        queue = self._rollouts.queue
        queue.load_state_dict(state["queue"])
        skipped = self._stage.batches_skipped - state["batches_skipped"]
        if skipped:
            self._logged = {}
            failure = self._ranks.try_on_rank0(lambda: self._log.forget(queue.next_step - 1))
            if failure is not None:
                raise SaveFailed(f"the log of rollouts in {self._stage.rollout_files} cannot be written: {failure}")
            queue.leave_out(skipped)

    # ---

    def _replayed(self, logged: LoggedStep) -> tuple[Batch, dict[str, float]]:
        """Return the rollouts of a step that the run has logged before it was ended."""
        rollouts = self._gather_facts(self._record.of_step(logged.step, 0))
        self._rollouts.queue.replay(logged.ended)
        return rollouts, dict(logged.metrics)

    def _learned(self, groups: StepGroups | None, idle: float | None) -> tuple[Batch, dict[str, float]]:
        """Return the rollouts of groups that rank 0 has, with their metrics.

        Args:
            groups: The groups, on rank 0.
            idle: The share of time in which training has waited.
        """
        used = self._assembled(() if groups is None else groups.used)
        # Groups without a sample that counts have no rewards to compare with others, and nothing but metrics.
        silent = [] if groups is None else [group for group in groups.equal if not self._counts(group)]
        equal = self._assembled([] if groups is None else [group for group in groups.equal if self._counts(group)])
        rollouts = self._gather_facts(None if used is None else used.batch)
        seen, metrics = rollouts, RewardMetrics()
        if self._ranks.share(lambda: equal is not None):
            seen = Batch.join([rollouts, self._gather_facts(None if equal is None else equal.batch)])
        for each in (used, equal):
            if each is not None:
                metrics.add(each.metrics)
        for group in silent:
            metrics.add(replace(group.scores.metrics, scores={}))
        others = self._ranks.share(lambda: metrics.values() | self._queue_metrics(groups, idle))
        prompts = [prompt for group in (() if groups is None else groups.used) for prompt in group.prompts]
        self._record.add(0, rollouts, prompts, RewardMetrics() if used is None else used.metrics)
        return rollouts, statistics(seen, self._group_size) | others

    def _gather_facts(self, own: BatchedDataDict | None) -> Batch:
        """Return a batch that rank 0 has as one of all ranks. Collective."""
        return Batch.gather_facts(own, self._stage.policy.topology, self._store)

    def _assembled(self, groups: Sequence[Group]) -> Scored | None:
        """Return groups as a batch on rank 0; None on other ranks, or if there are none. Collective."""
        return self._ranks.run_on_rank0(lambda: self._assembled_here(groups) if groups else None, ROLLOUT_ERRORS)

    def _counts(self, group: Group) -> bool:
        """Return whether a sample of a group may be learned from."""
        return bool(self._stage.rollouts.samples_that_count(group.results, self._group_size).any())

    def _assembled_here(self, groups: Sequence[Group]) -> Scored:
        prompts = [prompt for group in groups for prompt in group.prompts]
        results = [result for group in groups for result in group.results]
        scores = Scores.joined([group.scores for group in groups])
        scored = self._stage.rollouts.assembled(prompts, results, scores, self._sampling, self._group_size)
        add_data_sets(scored.batch, prompts, self._mixture)
        return scored

    def _queue_metrics(self, groups: StepGroups | None, idle: float | None) -> dict[str, float]:
        assert groups is not None  # this is rank 0
        is_of_engine = float(self._stage.config.rollout.correction == "engine")
        found = _queue_metrics(groups) | self._devices | {"old_logprobs_of_engine": is_of_engine}
        return found if idle is None else found | {"trainer_idle": idle}

    def _tasks_at(self, number: int) -> list[RolloutTask]:
        """Return the tasks of the group at a place of the stream: those of a synchronous run."""
        batch, place = divmod(number, self._per_step)
        prompt = self._prompts.loader.batch(batch)[place]
        step, round_ = divmod(batch, self._rounds)
        seed = seed_of_batch(self._seed, step + 1) + round_
        return tasks_of([prompt] * self._group_size, seed, place * self._group_size)

    def _before_sync(self) -> None:
        served = self._engine.served
        if served is None or served.version != self._stage.policy.weight_version:
            self._rollouts.before_sync(*self._weights())

    def _after_sync(self) -> None:
        self._rollouts.after_sync(*self._weights())

    def _weights(self) -> tuple[int, int]:
        """Return the version of the policy's weights, and the step that begins with them."""
        step, version = self._collected
        newest = self._stage.policy.weight_version
        return newest, step if newest == version else step + 1


def queue_rules(rollout: TrajectoryConfig, algorithm: RolloutConfig, num_steps: int) -> QueueRules:
    """Return how many groups run."""
    return QueueRules(
        algorithm.prompts_per_step, num_steps, rollout.max_trajectory_age_steps, rollout.over_sampling,
        rollout.partial, algorithm.rounds_per_step, algorithm.drops_equal_rewards,
    )  # fmt: skip


def _queue_metrics(groups: StepGroups) -> dict[str, float]:
    ages = torch.tensor([age for group in groups.used for age in group.ages], dtype=torch.float32)
    reasons = list(groups.dropped.values())
    return {
        "trajectory_age_mean": ages.mean().item(),
        "trajectory_age_max": ages.max().item(),
        "partial_trajectories": float(sum(group.num_partial for group in groups.used)),
        "dropped_groups": float(len(reasons)),
        "dropped_groups_too_old": float(reasons.count(TOO_OLD)),
        "dropped_groups_not_in_time": float(reasons.count(NOT_IN_TIME)),
        "refilled_groups": float(groups.num_refilled),
        "running_groups": float(groups.num_running),
        "ready_groups": float(groups.num_ready),
        "engine_idle": groups.engine_idle,
    }


def _logged(step: int, groups: StepGroups, outcome: Mapping[str, float]) -> LoggedStep:
    used = []
    for group in groups.used:
        versions = sorted(group.versions)
        location = group.prompts[0].problem.location or ""
        used.append(LoggedGroup(group.number, location, list(group.ages), [*versions[:1], *versions[-1:]]))
    return LoggedStep(step, used, dict(groups.dropped), dict(outcome))

"""`ScoredRollouts`: produces trajectories for prompts and adds their rewards, for training and evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from rl_megatron import log
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.config.rewards import ENVIRONMENT
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.generation.requests import derive_seed
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rewards.samples import Sample
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.rollouts.batch import build_component_keys, build_trajectory_batch
from rl_megatron.rollouts.runner import ROLLOUT_ERRORS, RolloutFailed, RolloutRunner, RolloutTask, TaskResult
from rl_megatron.rollouts.tools.toolbox import COUNTS
from rl_megatron.timing import phase


@dataclass(frozen=True)
class Scores:
    """The scores of trajectories.

    Attributes:
        samples: The last turn of each trajectory, as reward functions get it.
        succeeded: Which trajectories did not fail, [N] bool.
        rewards: The reward of each trajectory; 0 for one that failed.
        metrics: The metrics of the reward functions.
    """

    samples: Sequence[Sample]
    succeeded: torch.Tensor
    rewards: torch.Tensor
    metrics: RewardMetrics

    @classmethod
    def join(cls, parts: Sequence[Scores]) -> Scores:
        """Join the scores of several lists of trajectories."""
        metrics = RewardMetrics()
        for part in parts:
            metrics.add(part.metrics)
        for name in metrics.scores:  # an environment or a function may have scored only some of the parts
            of_parts = [part.metrics.scores.get(name) or [None] * len(part.rewards) for part in parts]
            metrics.scores[name] = [score for of_part in of_parts for score in of_part]
        samples = [sample for part in parts for sample in part.samples]
        succeeded, rewards = (torch.cat([getattr(part, name) for part in parts]) for name in ("succeeded", "rewards"))
        return cls(samples, succeeded, rewards, metrics)


@dataclass(frozen=True)
class FailureRule:
    """The rule for the samples of a group if some of them failed.

    Attributes:
        masks_group: Whether nothing is learned from the group.
        least_samples: If `masks_group` is False, how many samples must have succeeded.
    """

    masks_group: bool = True
    least_samples: int = 1

    def samples_that_count(self, succeeded: torch.Tensor, group_size: int) -> torch.Tensor:
        """Return which samples are learned from, [N] bool, given which ones succeeded, [N] bool."""
        groups = succeeded.view(-1, group_size)
        least = group_size if self.masks_group else min(self.least_samples, group_size)
        return (groups & (groups.sum(1, keepdim=True) >= least)).view(-1)


@dataclass(frozen=True)
class Scored(Scores):
    """Trajectories with their scores.

    Attributes:
        batch: The batch of `build_trajectory_batch`, with `rewards` [B], the reward of each sequence's trajectory.
        num_sampled: The number of tokens that the policy sampled in each trajectory.
    """

    batch: BatchedDataDict
    num_sampled: Sequence[int]

    @property
    def num_failed(self) -> int:
        return len(self.succeeded) - int(self.succeeded.sum())


class ScoredRollouts:
    """A rollout worker with reward functions, which produces scored trajectories."""

    def __init__(
        self,
        runner: RolloutRunner,
        scorer: Scorer,
        tokenizer: Tokenizer,
        *,
        with_components: bool = False,
        on_failure: FailureRule | None = None,
    ):
        """Use these parts, which the caller owns.

        Args:
            runner: The runner of the worker.
            scorer: The scorer of its trajectories.
            tokenizer: The run's tokenizer.
            with_components: Whether batches get the scores of each reward function (`rollouts.batch.COMPONENT`).
            on_failure: The rule for the group of a trajectory that failed; None: nothing is learned from the group.
        """
        self.runner, self.scorer, self.tokenizer = runner, scorer, tokenizer
        self.on_failure = on_failure or FailureRule()
        self._with_components = with_components

    def start(self) -> None:
        """Start the processes that the first trajectories need, without waiting for them. Collective."""
        self.scorer.start()

    def make(
        self,
        engine: RolloutEngine,
        prompts: Sequence[EncodedPrompt],
        sampling: Sampling,
        seed: int,
        group_size: int = 1,
    ) -> Scored | None:
        """Return one scored trajectory for each prompt on rank 0, and None on other ranks. Collective.

        The masks and rewards of a failed trajectory are 0. According to `on_failure`, those of the rest of its group
        are also 0, either always or if too few of the group succeeded.

        Args:
            engine: The engine, which has the policy's current weights.
            prompts: The prompts; only rank 0 needs them.
            sampling: How completions are sampled unless the worker chooses otherwise.
            seed: The seed of all random numbers of the engine.
            group_size: How many consecutive trajectories are compared with each other.

        Raises:
            RolloutFailed: A trajectory failed in all attempts and this ends the run, or no group is left to learn from.
            RewardFailed: A reward function gave no score, and this ends the run.
            EngineFailed: The engine cannot continue.
            NonFiniteLoss: Logits are NaN or infinite.
        """
        ranks = self.runner.ranks
        results = self.runner.run(build_tasks(prompts, seed) if ranks.leads else (), engine, sampling)
        batch = ranks.run_on_rank0(lambda: self._build_batch(results, sampling), ROLLOUT_ERRORS)
        with phase("reward"):
            scores = self.score(results, self.scorer)
        return ranks.run_on_rank0(
            lambda: self._add_rewards(cast(BatchedDataDict, batch), results, scores, group_size), ROLLOUT_ERRORS
        )

    def score(self, results: Sequence[TaskResult], scorer: Scorer) -> Scores:
        """Return the scores of trajectories. Collective, unless the scorer has a single rank.

        Ranks other than 0 pass no trajectories, and get no scores.
        """
        with_ids = scorer.reads_sequences
        samples = [self._build_sample(result, with_ids) for result in results]
        succeeded = torch.tensor([result.trajectory is not None for result in results], dtype=torch.bool)
        rewards, metrics = _score_succeeded(scorer, samples, succeeded)
        if self.runner.makes_turns:
            _observe_turns(metrics, results)
        return Scores(samples, succeeded, rewards, metrics)

    def assemble(self, results: Sequence[TaskResult], scores: Scores, sampling: Sampling, group_size: int) -> Scored:
        """Combine trajectories and their scores into what `make` returns. This is not collective."""
        return self._add_rewards(self._build_batch(results, sampling), results, scores, group_size)

    def _build_batch(self, results: Sequence[TaskResult], sampling: Sampling) -> BatchedDataDict:
        trajectories = [result.trajectory for result in results]
        if all(trajectory is None for trajectory in trajectories):
            raise RolloutFailed(f"all {len(results)} trajectories failed; the first one: {results[0].failure}")
        prompts = [result.task.prompt for result in results]
        return build_trajectory_batch(trajectories, prompts, sampling, self.runner.makes_turns)

    def _build_sample(self, result: TaskResult, with_ids: bool) -> Sample:
        """Return a trajectory as reward functions get it: the completion is the last turn.

        If `with_ids`, the sample has the tokens of the whole sequence, which reward models read.
        """
        problem, trajectory = result.task.prompt.problem, result.trajectory
        if trajectory is None:
            return Sample(problem, "", [], True)
        turns = trajectory.turns
        ids = list(turns[-1].completion.ids)
        texts = [self.tokenizer.decode(turn.completion.ids) for turn in turns]
        sample = Sample(
            problem, texts[-1], ids, trajectory.truncated, trajectory.messages,
            texts if len(texts) > 1 else (), trajectory.metadata, trajectory.environment_reward,
        )  # fmt: skip
        if not with_ids:
            return sample
        last = next(segment for segment in reversed(trajectory.segments) if segment.turns)
        sequence, prefix = list(last.ids[: last.turns[-1].end]), self.tokenizer.prefix_ids
        without = sequence[len(prefix) :] if sequence[: len(prefix)] == prefix else sequence
        text = self.tokenizer.decode(without, skip_special_tokens=False)
        return replace(sample, sequence_ids=sequence, sequence_text=text)

    def _add_rewards(
        self, batch: BatchedDataDict, results: Sequence[TaskResult], scores: Scores, group_size: int
    ) -> Scored:
        """Add rewards to a batch, and set to 0 the masks of trajectories that do not count."""
        succeeded, counts = scores.succeeded, self.on_failure.samples_that_count(scores.succeeded, group_size)
        if not counts.any():
            first = next(result.failure for result in results if result.trajectory is None)
            if self.on_failure.masks_group:
                raise RolloutFailed(
                    f"every group has a trajectory that failed, so nothing is left to learn from: {first}"
                )
            raise RolloutFailed(
                f"too many trajectories of every group failed, so nothing is left to learn from: {first}"
            )
        if self.runner.makes_turns and group_size > 1:
            masked = ~counts.view(-1, group_size).any(1)
            scores.metrics.count("masked_groups", int(masked.sum()))
            if not self.on_failure.masks_group:
                self._log_masked(results, succeeded.view(-1, group_size).sum(1), masked)
        index = TrajectoryIndex(batch)
        if not counts.all():
            for key in ("sample_mask", "token_mask"):
                batch[key][~index.spread(counts)] = 0.0
        batch["rewards"] = index.spread(torch.where(counts, scores.rewards, 0.0))
        if self._with_components:
            components = build_component_keys(scores.metrics.scores, counts, self.runner.makes_turns)
            batch |= {key: index.spread(values) for key, values in components.items()}
        turns = [() if result.trajectory is None else result.trajectory.turns for result in results]
        num_sampled = [sum(len(turn.completion.ids) for turn in trajectory_turns) for trajectory_turns in turns]
        return Scored(**vars(scores), batch=batch, num_sampled=num_sampled)

    def _log_masked(self, results: Sequence[TaskResult], left: torch.Tensor, masked: torch.Tensor) -> None:
        """Log each group that is `masked` although some samples succeeded; `left` [groups] counts these samples."""
        size = len(results) // len(left)
        for number in (masked & (left > 0)).nonzero()[:, 0].tolist():
            failure = next(r.failure for r in results[number * size :] if r.trajectory is None)
            log.LOGGER.warning(
                "only %d of the %d samples of a prompt succeeded, but at least %d are needed; nothing is learned from "
                "them. The first failure: %s",
                *(int(left[number]), size, self.on_failure.least_samples, failure),
            )


def build_tasks(prompts: Sequence[EncodedPrompt], seed: int, first: int = 0) -> list[RolloutTask]:
    """Return a task for each prompt; `first` is the first task's number among all tasks with this seed."""
    return [
        RolloutTask(f"{seed}-{number}", prompt, derive_seed(seed, number))
        for number, prompt in enumerate(prompts, first)
    ]


def _score_succeeded(
    scorer: Scorer, samples: Sequence[Sample], succeeded: torch.Tensor
) -> tuple[torch.Tensor, RewardMetrics]:
    """Return the rewards of samples, 0 for failed ones, and the metrics of reward functions."""
    there = [sample for sample, has_succeeded in zip(samples, succeeded.tolist(), strict=True) if has_succeeded]
    scored, metrics = scorer.score_samples(there)
    environment_rewards = torch.tensor([sample.environment_reward for sample in there])
    if environment_rewards.any():
        scored = scored + environment_rewards
        metrics.scores[ENVIRONMENT] = environment_rewards.tolist()
    if succeeded.all():
        return scored, metrics
    for label, scores in metrics.scores.items():
        left = iter(scores)
        metrics.scores[label] = [next(left) if has_succeeded else None for has_succeeded in succeeded.tolist()]
    return torch.zeros(len(samples)).masked_scatter_(succeeded, scored), metrics


def _observe_turns(metrics: RewardMetrics, results: Sequence[TaskResult]) -> None:
    """Add metrics of trajectories with several turns."""
    trajectories = [result.trajectory for result in results]
    metrics.count("failed_trajectories", sum(trajectory is None for trajectory in trajectories))
    metrics.count("retried_trajectories", sum(result.attempts > 1 for result in results))
    for trajectory in trajectories:
        if trajectory is not None:
            metrics.observe("turns", len(trajectory.turns))
            metrics.observe("segments", len(trajectory.segments))
            for name in COUNTS:
                number = trajectory.metadata.get(name)
                if isinstance(number, int):
                    metrics.observe(name, number)

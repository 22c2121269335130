"""`ScoredRollouts`: makes trajectories for prompts, and adds their rewards. Training and evaluations both use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from rl_megatron.config.rewards import ENVIRONMENT
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.execution.phase_timer import phase
from rl_megatron.generation.completions import request_seed
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.rewards.reward_metrics import RewardMetrics
from rl_megatron.rewards.samples import Sample
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.rollouts.batch import component_keys, trajectory_batch
from rl_megatron.rollouts.rounds import RolloutTask, TaskResult
from rl_megatron.rollouts.runner import RolloutFailed, RolloutRunner
from rl_megatron.rollouts.tools.toolbox import COUNTS
from rl_megatron.rollouts.trajectory import Trajectory
from rl_megatron.rollouts.trajectory_index import TrajectoryIndex


@dataclass(frozen=True)
class Scores:
    """The scores of trajectories.

    Attributes:
        samples: The last turn of each trajectory, as reward functions get it.
        rewards: The reward of each trajectory; 0 for one that failed.
        metrics: The metrics of the reward functions.
    """

    samples: Sequence[Sample]
    rewards: torch.Tensor
    metrics: RewardMetrics

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Return the scores of several lists of trajectories as those of one."""
        metrics = RewardMetrics()
        for part in parts:
            metrics.add(part.metrics)
        for name in metrics.scores:  # an environment may give rewards in some parts only, and so may functions
            of_parts = [part.metrics.scores.get(name) or [None] * len(part.rewards) for part in parts]
            metrics.scores[name] = [score for of_part in of_parts for score in of_part]
        samples = [sample for part in parts for sample in part.samples]
        return cls(samples, torch.cat([part.rewards for part in parts]), metrics)


@dataclass(frozen=True)
class Scored:
    """Trajectories with their rewards.

    Attributes:
        batch: The batch that `trajectory_batch` returns, with `rewards` [B]: that of its trajectory for each sequence.
        samples: The last turn of each trajectory, as reward functions get it.
        rewards: The reward of each trajectory.
        num_sampled: The number of tokens that the policy sampled in each trajectory.
        metrics: The metrics of the reward functions.
        num_failed: How many trajectories failed; their rewards are 0.
    """

    batch: BatchedDataDict
    samples: Sequence[Sample]
    rewards: torch.Tensor
    num_sampled: Sequence[int]
    metrics: RewardMetrics
    num_failed: int = 0


class ScoredRollouts:
    """Trajectories of a rollout worker, with the rewards of reward functions.

    Attributes:
        runner: Runs the worker.
        scorer: Scores what the worker makes.
        tokenizer: The run's tokenizer.
    """

    def __init__(self, runner: RolloutRunner, scorer: Scorer, tokenizer: Tokenizer, *, with_components: bool = False):
        """Keep the parts, which belong to the caller.

        With `with_components`, batches get the scores of each reward function (`rollouts.batch.COMPONENT`).
        """
        self.runner, self.scorer, self.tokenizer = runner, scorer, tokenizer
        self._with_components = with_components

    def start(self) -> None:
        """Start processes that the first trajectories will need, without waiting for them. Collective."""
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

        Nothing is learned from the group of a trajectory that has failed: its masks and rewards are 0.

        Args:
            engine: The engine, which has the policy's current weights.
            prompts: The prompts; only rank 0 needs them.
            sampling: How completions are sampled if the worker does not say so.
            seed: The seed of all random numbers of the engine.
            group_size: How many trajectories in a row are compared with each other.

        Raises:
            RolloutFailed: A trajectory failed in all attempts, and the run is to end then.
            RewardFailed: A reward function gave no score, and the run is to end then.
            EngineFailed: The engine cannot go on.
            NonFiniteLoss: Logits are NaN or infinite.
        """
        prompts = prompts if self.runner.leads else ()
        results = self.runner.run(tasks_of(prompts, seed), engine, sampling)
        batch = self.runner.on_rank_0(lambda: self._batch(prompts, results, sampling))
        with phase("reward"):
            scores = self.score(prompts, results, self.scorer)
        return self.runner.on_rank_0(
            lambda: self._with_rewards(cast(BatchedDataDict, batch), results, scores, group_size)
        )

    def score(self, prompts: Sequence[EncodedPrompt], results: Sequence[TaskResult], scorer: Scorer) -> Scores:
        """Return the scores of the trajectories of prompts. Collective, unless the scorer is alone.

        Ranks other than 0 give no trajectories, and get no scores.
        """
        trajectories = [_trajectory(result) for result in results]
        with_ids = scorer.reads_sequences
        samples = [self._sample(*pair, with_ids) for pair in zip(prompts, trajectories, strict=True)]
        made = torch.tensor([each is not None for each in trajectories], dtype=torch.bool)
        rewards, metrics = _scored(scorer, samples, made)
        if self.runner.makes_turns:
            _observe(metrics, results, trajectories)
        return Scores(samples, rewards, metrics)

    def assembled(
        self,
        prompts: Sequence[EncodedPrompt],
        results: Sequence[TaskResult],
        scores: Scores,
        sampling: Sampling,
        group_size: int,
    ) -> Scored:
        """Return trajectories that have been made and scored, as `make` returns them. It is not collective.

        Raises:
            RolloutFailed: All trajectories failed.
            NonFiniteLoss: Logits were NaN or infinite.
        """
        return self._with_rewards(self._batch(prompts, results, sampling), results, scores, group_size)

    def _batch(
        self, prompts: Sequence[EncodedPrompt], results: Sequence[TaskResult], sampling: Sampling
    ) -> BatchedDataDict:
        trajectories = [_trajectory(result) for result in results]
        if all(each is None for each in trajectories):
            raise RolloutFailed(f"all {len(results)} trajectories failed; the first one: {results[0].failure}")
        return trajectory_batch(trajectories, prompts, sampling, self.runner.makes_turns)

    def _sample(self, prompt: EncodedPrompt, trajectory: Trajectory | None, with_ids: bool) -> Sample:
        """Return a trajectory as reward functions get it: the completion is the last turn.

        Args:
            prompt: The prompt.
            trajectory: The trajectory, or None if it failed.
            with_ids: Whether a reward model reads the tokens of the whole sequence.
        """
        if trajectory is None:
            return Sample(prompt.problem, "", [], True)
        turns = trajectory.turns
        ids = list(turns[-1].completion.ids)
        texts = [self.tokenizer.decode(turn.completion.ids) for turn in turns]
        sample = Sample(
            prompt.problem, texts[-1], ids, trajectory.truncated, trajectory.messages,
            texts if len(texts) > 1 else (), trajectory.metadata, trajectory.environment_reward,
        )  # fmt: skip
        if not with_ids:
            return sample
        last = next(segment for segment in reversed(trajectory.segments) if segment.turns)
        sequence, prefix = list(last.ids[: last.turns[-1].end]), self.tokenizer.prefix_ids
        without = sequence[len(prefix) :] if sequence[: len(prefix)] == prefix else sequence
        text = self.tokenizer.decode(without, skip_special_tokens=False)
        return replace(sample, sequence_ids=sequence, sequence_text=text)

    def _with_rewards(
        self, batch: BatchedDataDict, results: Sequence[TaskResult], scores: Scores, group_size: int
    ) -> Scored:
        """Return a batch with rewards, in which nothing is learned from the group of a trajectory that has failed."""
        trajectories = [_trajectory(result) for result in results]
        made = torch.tensor([each is not None for each in trajectories])
        whole = made.view(-1, group_size).all(1).repeat_interleave(group_size)
        if not whole.any():
            first = next(result.failure for result in results if not result.trajectories)
            raise RolloutFailed(f"every group has a trajectory that failed, so nothing is left to learn from: {first}")
        index = TrajectoryIndex(batch)
        if not whole.all():
            for key in ("sample_mask", "token_mask"):
                batch[key][~index.spread(whole)] = 0.0
        batch["rewards"] = index.spread(torch.where(whole, scores.rewards, 0.0))
        if self._with_components:
            components = component_keys(scores.metrics.scores, whole, self.runner.makes_turns)
            batch |= {key: index.spread(values) for key, values in components.items()}
        num_sampled = [
            0 if each is None else sum(len(turn.completion.ids) for turn in each.turns) for each in trajectories
        ]
        num_failed = len(trajectories) - int(made.sum())
        return Scored(batch, scores.samples, scores.rewards, num_sampled, scores.metrics, num_failed)


def tasks_of(prompts: Sequence[EncodedPrompt], seed: int, first: int = 0) -> list[RolloutTask]:
    """Return the tasks of prompts.

    Args:
        prompts: The prompts.
        seed: The seed of all random numbers.
        first: The number of the first of these prompts among those with the same seed.
    """
    return [
        RolloutTask(f"{seed}-{number}", prompt, request_seed(seed, number))
        for number, prompt in enumerate(prompts, first)
    ]


def _trajectory(result: TaskResult) -> Trajectory | None:
    return result.trajectories[0] if result.trajectories else None


def _scored(scorer: Scorer, samples: Sequence[Sample], made: torch.Tensor) -> tuple[torch.Tensor, RewardMetrics]:
    """Return the rewards of samples, 0 of those that were not made, and the metrics of reward functions."""
    there = [sample for sample, is_made in zip(samples, made.tolist(), strict=True) if is_made]
    scored, metrics = scorer.score_samples(there)
    given = torch.tensor([sample.environment_reward for sample in there])
    if given.any():
        scored = scored + given
        metrics.scores[ENVIRONMENT] = given.tolist()
    if made.all():
        return scored, metrics
    for label, scores in metrics.scores.items():
        left = iter(scores)
        metrics.scores[label] = [next(left) if is_made else None for is_made in made.tolist()]
    return torch.zeros(len(samples)).masked_scatter_(made, scored), metrics


def _observe(metrics: RewardMetrics, results: Sequence[TaskResult], trajectories: Sequence[Trajectory | None]) -> None:
    """Add metrics of trajectories with several turns."""
    metrics.count("failed_trajectories", sum(each is None for each in trajectories))
    metrics.count("retried_trajectories", sum(result.attempts > 1 for result in results))
    for trajectory in trajectories:
        if trajectory is not None:
            metrics.observe("turns", len(trajectory.turns))
            metrics.observe("segments", len(trajectory.segments))
            for name in COUNTS:
                number = trajectory.metadata.get(name)
                if isinstance(number, int):
                    metrics.observe(name, number)

"""`ScoredRollouts`: makes trajectories for prompts, and adds their rewards. Training and evaluations both use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.execution.phase_timer import phase
from rl_megatron.generation.completions import request_seed
from rl_megatron.generation.interfaces import RolloutEngine, Sampling
from rl_megatron.rewards.samples import Sample
from rl_megatron.rewards.scorer import RewardMetrics, Scorer
from rl_megatron.rollouts.batch import trajectory_batch
from rl_megatron.rollouts.rounds import RolloutTask, TaskResult
from rl_megatron.rollouts.runner import RolloutFailed, RolloutRunner
from rl_megatron.rollouts.tools.toolbox import COUNTS
from rl_megatron.rollouts.trajectory import Trajectory
from rl_megatron.rollouts.trajectory_index import TrajectoryIndex


@dataclass(frozen=True)
class Scored:
    """Trajectories with their rewards.

    Attributes:
        batch: The batch that `trajectory_batch` returns, with `rewards` [B]: that of its trajectory for each sequence.
            Only rank 0 has it; it is None on other ranks.
        samples: The last turn of each trajectory, as reward functions get it.
        rewards: The reward of each trajectory.
        num_sampled: The number of tokens that the policy sampled in each trajectory.
        metrics: The metrics of the reward functions.
    """

    batch: BatchedDataDict | None
    samples: Sequence[Sample]
    rewards: torch.Tensor
    num_sampled: Sequence[int]
    metrics: RewardMetrics


class ScoredRollouts:
    """Trajectories of a rollout worker, with the rewards of reward functions."""

    def __init__(self, runner: RolloutRunner, scorer: Scorer, tokenizer: Tokenizer):
        """Keep the parts, which belong to the caller.

        Args:
            runner: Runs the worker.
            scorer: Scores what the worker makes.
            tokenizer: The run's tokenizer.
        """
        self._runner, self._scorer, self._tokenizer = runner, scorer, tokenizer

    def start(self) -> None:
        """Start processes that the first trajectories will need, without waiting for them. Collective."""
        self._scorer.start()

    def make(
        self,
        engine: RolloutEngine,
        prompts: Sequence[EncodedPrompt],
        sampling: Sampling,
        seed: int,
        group_size: int = 1,
    ) -> Scored:
        """Return one scored trajectory for each prompt. Collective.

        Nothing is learned from the group of a trajectory that has failed: its masks and rewards are 0.

        Args:
            engine: The engine, which has the policy's current weights.
            prompts: The prompts.
            sampling: How completions are sampled if the worker does not say so.
            seed: The seed of all random numbers of the engine.
            group_size: How many trajectories in a row are compared with each other.

        Raises:
            RolloutFailed: A trajectory failed in all attempts, and the run is to end then.
            RewardFailed: A reward function gave no score, and the run is to end then.
            EngineFailed: The engine cannot go on.
            NonFiniteLoss: Logits are NaN or infinite.
        """
        tasks = [
            RolloutTask(f"{seed}-{number}", prompt, request_seed(seed, number)) for number, prompt in enumerate(prompts)
        ]
        results = self._runner.run(tasks, engine, sampling)
        trajectories = [result.trajectories[0] if result.trajectories else None for result in results]
        if all(each is None for each in trajectories):
            raise RolloutFailed(f"all {len(results)} trajectories failed; the first one: {results[0].failure}")
        batch = self._runner.on_rank_0(
            lambda: trajectory_batch(trajectories, prompts, sampling, self._runner.makes_turns)
        )
        with phase("reward"):
            samples = [self._sample(*pair) for pair in zip(prompts, trajectories, strict=True)]
            made = torch.tensor([each is not None for each in trajectories])
            rewards, metrics = self._scored(samples, made)
        if self._runner.makes_turns:
            _observe(metrics, results, trajectories)
        whole = made.view(-1, group_size).all(1).repeat_interleave(group_size)
        if batch is not None:
            _give_rewards(batch, torch.where(whole, rewards, 0.0), whole)
        num_sampled = [
            0 if each is None else sum(len(turn.completion.ids) for turn in each.turns) for each in trajectories
        ]
        return Scored(batch, samples, rewards, num_sampled, metrics)

    def _scored(self, samples: Sequence[Sample], made: torch.Tensor) -> tuple[torch.Tensor, RewardMetrics]:
        """Return the rewards of samples, 0 of those that were not made, and the metrics of reward functions."""
        there = [sample for sample, is_made in zip(samples, made.tolist(), strict=True) if is_made]
        scored, metrics = self._scorer.score_samples(there)
        given = torch.tensor([sample.environment_reward for sample in there])
        if given.any():
            scored = scored + given
            metrics.scores["environment"] = given.tolist()
        if made.all():
            return scored, metrics
        for label, scores in metrics.scores.items():
            left = iter(scores)
            metrics.scores[label] = [next(left) if is_made else None for is_made in made.tolist()]
        return torch.zeros(len(samples)).masked_scatter_(made, scored), metrics

    def _sample(self, prompt: EncodedPrompt, trajectory: Trajectory | None) -> Sample:
        """Return a trajectory as reward functions get it: the completion is the last turn."""
        if trajectory is None:
            return Sample(prompt.problem, "", [], True)
        turns = trajectory.turns
        ids = list(turns[-1].completion.ids)
        texts = [self._tokenizer.decode(turn.completion.ids) for turn in turns]
        return Sample(
            prompt.problem, texts[-1], ids, trajectory.truncated, trajectory.messages,
            texts if len(texts) > 1 else (), trajectory.metadata, trajectory.environment_reward,
        )  # fmt: skip


def _give_rewards(batch: BatchedDataDict, rewards: torch.Tensor, whole: torch.Tensor) -> None:
    """Add the rewards of trajectories to their sequences, and mask those of groups that are not whole."""
    index = TrajectoryIndex(batch)
    if not whole.all():
        for key in ("sample_mask", "token_mask"):
            batch[key][~index.spread(whole)] = 0.0
    batch["rewards"] = index.spread(rewards)


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

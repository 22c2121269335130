"""What a stage trains on: its dataset and the order of its batches, or the problems whose prompts it samples."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.config.algorithms import RolloutConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig, TrainConfig
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.order import BatchSchedule
from rl_megatron.data.sources import build_source
from rl_megatron.data.tasks import Problem
from rl_megatron.data.tokenizer import Tokenizer


def training_dataset(stage: StageConfig, tokenizer: Tokenizer) -> Dataset:
    """Return the training data of the kind that the stage's algorithm learns from."""
    return build_source(stage).dataset(stage.algorithm.learns_from, tokenizer)


def batch_order(dataset: Dataset, train: TrainConfig) -> BatchSchedule:
    """Return which items of the dataset form the batch of each step; steps are numbered from 0."""
    return BatchSchedule(len(dataset), train.global_batch_size // dataset.group_size, train.seed)


def check_dataset(stage: StageConfig, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """Check that there are enough items for a batch; return for each item the numbers of tokens of its sequences.

    Raises:
        ConfigError: There are fewer pairs than a batch has.
        ValueError: There are fewer sequences than a batch has.
    """
    dataset, train = training_dataset(stage, tokenizer), stage.train
    items = train.global_batch_size // dataset.group_size
    if dataset.group_size == 2 and items > len(dataset):
        raise ConfigError(
            f"train.global_batch_size={train.global_batch_size} is {items} pairs of two sequences, and data.path="
            f"{stage.data.path} has {len(dataset)} pairs to train on; lower it, or provide more data"
        )
    batch_order(dataset, train)
    return dataset.item_lengths()


def prompt_ids(problem: Problem, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a problem's prompt, as a rollout engine gets them for rollouts and for evaluations."""
    return tokenizer.encode(problem.prompt)


def training_problems(stage: StageConfig, algorithm: RolloutConfig) -> list[Problem]:
    """Return the training problems: generated ones for all steps of the stage, or all that the source has."""
    return build_source(stage).problems(algorithm.prompts_of_all_steps(stage.train))


class RolloutPrompts:
    """The prompts that each rollout step samples completions for.

    They depend only on `train.seed` and on the numbers of the step and the round. A resumed run therefore samples the
    same as an uninterrupted run.
    """

    def __init__(self, stage: StageConfig, algorithm: RolloutConfig):
        self._rounds = algorithm.rounds_per_step
        self._problems = training_problems(stage, algorithm)
        self._order = BatchSchedule(len(self._problems), algorithm.prompts_per_step, stage.train.seed)

    def problems_at(self, step: int, round_: int = 0) -> list[Problem]:
        """Return the different problems of a round of step `step` ≥ 1."""
        return [self._problems[index] for index in self._order.items_at((step - 1) * self._rounds + round_)]

"""Build and check the training dataset of a stage, for algorithms that learn from a dataset."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.order import BatchSchedule
from rl_megatron.data.sources import build_source
from rl_megatron.data.tokenizer import Tokenizer


def training_dataset(stage: StageConfig, tokenizer: Tokenizer) -> Dataset:
    """Return the training data of the kind that the stage's algorithm learns from."""
    return build_source(stage).dataset(stage.algorithm.learns_from, tokenizer)


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
    BatchSchedule(len(dataset), items, train.seed)
    return dataset.item_lengths()

"""Build the loader of a stage from its data section: one data set or a mixture, in memory or streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.config.train import TrainConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.loader import Component, DataLoader, InMemory, Items, Streamed
from rl_megatron.data.mixture import MixtureCounts, configured_weights
from rl_megatron.data.order import check_batch_size
from rl_megatron.data.sources import DataSource, RecordSource, build_source
from rl_megatron.data.sources.mixed import mixed_stages
from rl_megatron.data.tokenizer import Tokenizer

BatchT = TypeVar("BatchT")


def dataset_loader(stage: StageConfig, tokenizer: Tokenizer) -> DataLoader[BatchedDataDict]:
    """Return the loader of the training data that the stage's algorithm learns from.

    Raises:
        ConfigError: There is too little data for a batch, or none.
    """

    def build(_: str, of_component: StageConfig, source: DataSource) -> Dataset:
        return source.dataset(of_component.algorithm.learns_from, tokenizer)

    def join(batches: list[BatchedDataDict], order: list[int]) -> BatchedDataDict:
        whole = BatchedDataDict.from_batches(batches, {"input_ids": tokenizer.pad_id})
        size = whole.size // len(order)  # sequences of an item
        return whole.select_indices([item * size + each for item in order for each in range(size)])

    components = components_of(stage, build)
    group_size = getattr(components[0].first, "group_size", 1)
    items = stage.train.global_batch_size // group_size
    if len(components) == 1 and group_size == 2 and items > len(components[0].first) and not stage.data.streaming:
        raise ConfigError(
            f"train.global_batch_size={stage.train.global_batch_size} is {items} pairs of two sequences, and data.path="
            f"{stage.data.path} has {len(components[0].first)} pairs to train on; lower it, or provide more data"
        )
    return loader_of(stage, components, items, join)


def in_memory_loader(dataset: Dataset, train: TrainConfig) -> DataLoader[BatchedDataDict]:
    """Return the loader of a dataset in memory."""
    items = train.global_batch_size // dataset.group_size
    check_batch_size(len(dataset), items)
    counts = MixtureCounts(["data"], items, lambda step: [1.0])
    return DataLoader([InMemory("data", dataset, train.seed)], counts, train.seed, _never)


def loader_of(
    stage: StageConfig,
    components: Sequence[Component[BatchT]],
    batch_size: int,
    join: Callable[[list[BatchT], list[int]], BatchT],
    batches_per_step: int = 1,
) -> DataLoader[BatchT]:
    """Return the loader of components, with the weights of the stage's mixture.

    Args:
        stage: The stage.
        components: Its data sets.
        batch_size: The items of a batch.
        join: Returns one batch of several, with the items in the order of these indices.
        batches_per_step: The batches that a step may take.

    Raises:
        ValueError: The only data set is in memory and has fewer items than a batch.
        ConfigError: `data.mix_weights` cannot be imported, or does not return weights for the first step.
    """
    if len(components) == 1 and not stage.data.streaming:
        check_batch_size(len(components[0].first), batch_size)
    names = [component.name for component in components]
    counts = MixtureCounts(names, batch_size, configured_weights(stage.data), batches_per_step)
    if len(components) > 1:
        counts.at(0)
    can_fail = stage.data.streaming or stage.data.mix_weights is not None
    return DataLoader(components, counts, stage.train.seed, join, can_fail)


def components_of(
    stage: StageConfig, build: Callable[[str, StageConfig, DataSource], Items[BatchT]]
) -> list[Component[BatchT]]:
    """Return the data sets of a stage.

    Args:
        stage: The stage.
        build: Returns the items of a data set from its name, the stage as if it had no other, and its data source.
    """
    if not stage.data.mix:
        name = stage.data.dataset_name or str(stage.data.path)
        return [_component(name, stage, build, stage.train.seed)]
    return [
        _component(name, of_component, build, f"{stage.train.seed}/{name}")
        for name, of_component in mixed_stages(stage)
    ]


def _component(
    name: str, stage: StageConfig, build: Callable[[str, StageConfig, DataSource], Items[BatchT]], seed: int | str
) -> Component[BatchT]:
    source = build_source(stage)
    if not stage.data.streaming:
        return InMemory(name, build(name, stage, source), seed)
    assert isinstance(source, RecordSource)  # DataConfig.check refuses streaming for other sources
    return Streamed(
        name,
        source.training_reader(),
        lambda records: build(name, stage, source.of_block(records)),
        stage.data.shuffle_block,
        seed,
    )


def _never(batches: list[BatchedDataDict], order: list[int]) -> BatchedDataDict:
    raise AssertionError("a loader of one data set in memory has nothing to join")

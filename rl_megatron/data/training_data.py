"""Build the training data of a stage from its data section: datasets, the loader of batches, and prompts for rollouts.

A stage has one data set or a mixture, in memory or streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from rl_megatron.config.algorithm_kinds import RolloutConfig
from rl_megatron.config.errors import ConfigError, convert_errors
from rl_megatron.config.schema import StageConfig
from rl_megatron.config.train import TrainConfig
from rl_megatron.data import token_cache
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.encoding import EncodedPrompt, Limit, apply_limit
from rl_megatron.data.loader import Component, DataLoader, InMemory, ItemList, Items, Streamed
from rl_megatron.data.mixture import MixtureCounts, load_weights
from rl_megatron.data.order import check_batch_size
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.sources import DataSource, RecordSource, build_source
from rl_megatron.data.sources.mixed import split_mixture
from rl_megatron.data.tasks import Problem
from rl_megatron.data.token_cache import serialize_record
from rl_megatron.data.tokenizer import Tokenizer

BatchT = TypeVar("BatchT")


# --- datasets and loaders ---


def build_dataset(stage: StageConfig, tokenizer: Tokenizer) -> Dataset:
    """Return the training data of a stage with one data set in memory."""
    return build_source(stage).dataset(stage.algorithm.learns_from, tokenizer)


def check_dataset(stage: StageConfig, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """Check that there are enough items for a batch; return, for each item, the lengths of its sequences in tokens.

    Of streamed data, only the first block is checked.
    """
    loader = build_dataset_loader(stage, tokenizer)
    datasets = [cast(Dataset, component.first) for component in loader.components]
    return [lengths for dataset in datasets for lengths in dataset.item_lengths()]


def build_dataset_loader(stage: StageConfig, tokenizer: Tokenizer) -> DataLoader[BatchedDataDict]:
    """Return the loader of a stage's training data."""

    def build(_: str, component_stage: StageConfig, source: DataSource) -> Dataset:
        return source.dataset(component_stage.algorithm.learns_from, tokenizer)

    def join(batches: list[BatchedDataDict], order: list[int]) -> BatchedDataDict:
        whole = BatchedDataDict.from_batches(batches, {"input_ids": tokenizer.pad_id})
        size = whole.size // len(order)  # sequences of an item
        return whole.select_indices([item * size + offset for item in order for offset in range(size)])

    components = build_components(stage, build)
    group_size = getattr(components[0].first, "group_size", 1)
    items = stage.train.global_batch_size // group_size
    if len(components) == 1 and group_size == 2 and items > len(components[0].first) and not stage.data.streaming:
        raise ConfigError(
            f"train.global_batch_size={stage.train.global_batch_size} is {items} pairs of two sequences, and data.path="
            f"{stage.data.path} has {len(components[0].first)} pairs to train on; lower it, or provide more data"
        )
    return build_loader(stage, components, items, join)


def build_in_memory_loader(dataset: Dataset, train: TrainConfig) -> DataLoader[BatchedDataDict]:
    """Return the loader of a dataset in memory."""
    items = train.global_batch_size // dataset.group_size
    check_batch_size(len(dataset), items)
    counts = MixtureCounts(["data"], items, lambda step: [1.0])
    return DataLoader([InMemory("data", dataset, train.seed)], counts, train.seed, _refuse_join)


def build_loader(
    stage: StageConfig,
    components: Sequence[Component[BatchT]],
    batch_size: int,
    join: Callable[[list[BatchT], list[int]], BatchT],
    batches_per_step: int = 1,
) -> DataLoader[BatchT]:
    """Return a loader that mixes the components by the weights of the stage's mixture.

    Args:
        stage: The stage.
        components: Its data sets.
        batch_size: The number of items in a batch.
        join: Joins batches into one, with the items in the order of the given indices.
        batches_per_step: The maximum number of batches per step.
    """
    if len(components) == 1 and not stage.data.streaming:
        check_batch_size(len(components[0].first), batch_size)
    names = [component.name for component in components]
    counts = MixtureCounts(names, batch_size, load_weights(stage.data), batches_per_step)
    if len(components) > 1:
        counts.at(0)
    can_fail = stage.data.streaming or stage.data.mix_weights is not None
    return DataLoader(components, counts, stage.train.seed, join, can_fail)


def build_components(
    stage: StageConfig, build: Callable[[str, StageConfig, DataSource], Items[BatchT]]
) -> list[Component[BatchT]]:
    """Return the data sets of a stage.

    Args:
        stage: The stage.
        build: Returns the items of a data set, given its name, the stage with only this data set, and its data source.
    """
    if not stage.data.mix:
        name = stage.data.dataset_name or str(stage.data.path)
        return [_build_component(name, stage, build, stage.train.seed)]
    return [
        _build_component(name, component_stage, build, f"{stage.train.seed}/{name}")
        for name, component_stage in split_mixture(stage)
    ]


def _build_component(
    name: str, stage: StageConfig, build: Callable[[str, StageConfig, DataSource], Items[BatchT]], seed: int | str
) -> Component[BatchT]:
    source = build_source(stage)
    if not stage.data.streaming:
        return InMemory(name, build(name, stage, source), seed)
    assert isinstance(source, RecordSource)  # DataConfig.check refuses streaming for other sources
    return Streamed(
        name,
        source.training_reader(),
        lambda records: build(name, stage, source.with_block(records)),
        stage.data.shuffle_block,
        seed,
    )


def _refuse_join(batches: list[BatchedDataDict], order: list[int]) -> BatchedDataDict:
    raise AssertionError("a loader of one data set in memory has nothing to join")


# --- prompts for rollouts ---


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts for a rollout engine, and the id of the token with which the chat template ends a completion, if any."""

    prompts: list[EncodedPrompt]
    end_of_turn_ids: tuple[int, ...]


def encode_prompts(stage: StageConfig, problems: Sequence[Problem], renderer: Renderer) -> EncodedPrompts:
    """Return the problems' prompts as tokens, each short enough to leave space for a completion.

    `data.too_long` decides what happens to a prompt that leaves too little space.
    """
    limit = Limit.for_prompts(stage.model.max_sequence_length, stage.generation.max_new_tokens, stage.data.too_long)
    records = [problem.as_record() for problem in problems]
    # Generated problems may repeat, so each is encoded once. The tokens may depend on any field, such as messages.
    keys = [serialize_record(record) for record in records]
    different: dict[str, Record] = {}
    for key, record in zip(keys, records, strict=True):
        different.setdefault(key, record)
    ids = dict(zip(different, token_cache.encode_prompts(renderer, list(different.values())), strict=True))
    prompts = [
        renderer.build_prompt(problem, record, ids[key])
        for problem, record, key in zip(problems, records, keys, strict=True)
    ]
    return EncodedPrompts(convert_errors(lambda: apply_limit(prompts, limit)), renderer.end_of_turn_ids)


class RolloutPrompts:
    """The prompts that each rollout step samples completions for.

    They depend only on `train.seed` and on the numbers of the step and the round. A resumed run therefore samples for
    the same prompts as an uninterrupted one.

    Attributes:
        end_of_turn_ids: The tokens with which chat templates end a completion. A mixture has those of all its data
            sets.
        loader: The loader of the prompts.
    """

    def __init__(self, stage: StageConfig, algorithm: RolloutConfig, tokenizer: Tokenizer):
        self._rounds = algorithm.rounds_per_step
        self.end_of_turn_ids: tuple[int, ...] = ()
        number = algorithm.prompts_of_all_steps(stage.train)

        def build(name: str, component_stage: StageConfig, source: DataSource[Any]) -> ItemList[EncodedPrompt]:
            encoded = encode_prompts(component_stage, source.problems(number), source.renderer(tokenizer))
            self.end_of_turn_ids = tuple(dict.fromkeys((*self.end_of_turn_ids, *encoded.end_of_turn_ids)))
            return ItemList([replace(prompt, data_set=name) for prompt in encoded.prompts])

        components = build_components(stage, build)
        self._first = [prompt for component in components for prompt in cast(ItemList, component.first).items]
        if len(self._first) < algorithm.prompts_per_step:
            raise ConfigError(
                f"algorithm.prompts_per_step={algorithm.prompts_per_step} exceeds the {len(self._first)} training "
                "problems; lower it, or provide more data"
            )
        self.loader = build_loader(stage, components, algorithm.prompts_per_step, _join_prompts, self._rounds)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest prompt; of streamed data, only the first block counts."""
        return max(prompt.num_tokens for prompt in self._first)

    def at(self, step: int, round_: int = 0) -> list[EncodedPrompt]:
        """Return the prompts of a round of step `step` ≥ 1, as the rollout engine gets them."""
        return self.loader.batch((step - 1) * self._rounds + round_)


def _join_prompts(parts: list[list[EncodedPrompt]], order: list[int]) -> list[EncodedPrompt]:
    prompts = [prompt for part in parts for prompt in part]
    return [prompts[index] for index in order]

"""What a stage trains on: its dataset and the order of its batches, or the problems whose prompts it samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from rl_megatron.config.algorithm_kinds import RolloutConfig
from rl_megatron.config.errors import ConfigError, bad_input_named
from rl_megatron.config.schema import StageConfig
from rl_megatron.data import token_cache
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.encoding import EncodedPrompt, Limit, within_limit
from rl_megatron.data.loader import ItemList
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.sources import DataSource, build_source
from rl_megatron.data.stage_loader import components_of, dataset_loader, loader_of
from rl_megatron.data.tasks import Problem
from rl_megatron.data.token_cache import content_of
from rl_megatron.data.tokenizer import Tokenizer


def training_dataset(stage: StageConfig, tokenizer: Tokenizer) -> Dataset:
    """Return the training data that the stage's algorithm learns from, of a stage with one data set in memory."""
    return build_source(stage).dataset(stage.algorithm.learns_from, tokenizer)


def check_dataset(stage: StageConfig, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """Check that there are enough items for a batch; return for each item the numbers of tokens of its sequences.

    Of streamed data, the first block is checked.

    Raises:
        ConfigError: There are fewer pairs than a batch has.
        ValueError: There are fewer sequences than a batch has.
    """
    loader = dataset_loader(stage, tokenizer)
    datasets = [cast(Dataset, component.first) for component in loader.components]
    return [lengths for dataset in datasets for lengths in dataset.item_lengths()]


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts, as a rollout engine gets them for rollouts and for evaluations.

    Attributes:
        prompts: The prompts.
        end_of_turn_ids: The token with which the chat template ends a completion, or nothing.
    """

    prompts: list[EncodedPrompt]
    end_of_turn_ids: tuple[int, ...]


def encoded_prompts(stage: StageConfig, problems: Sequence[Problem], renderer: Renderer) -> EncodedPrompts:
    """Return the prompts of problems as tokens, with space for a completion behind each.

    `data.too_long` says what happens to a prompt that leaves too little space.

    Args:
        stage: The stage.
        problems: The problems.
        renderer: The renderer of their data source.

    Raises:
        ConfigError: A prompt is too long under "error", or none is left.
    """
    wanted = stage.generation.max_new_tokens
    limit = Limit(
        stage.model.max_sequence_length - wanted,
        stage.data.too_long,
        noun="prompt",
        name=f"model.max_sequence_length={stage.model.max_sequence_length} without generation.max_new_tokens={wanted}",
        remedy="lower generation.max_new_tokens or raise model.max_sequence_length",
    )
    records = [problem.as_record() for problem in problems]
    # Generated problems repeat. The tokens may follow from any field, such as messages.
    keys = [content_of(record) for record in records]
    different: dict[str, Record] = {}
    for key, record in zip(keys, records, strict=True):
        different.setdefault(key, record)
    ids = dict(zip(different, token_cache.encoded_prompts(renderer, list(different.values())), strict=True))
    prompts = [
        renderer.with_prompt(problem, record, ids[key])
        for problem, record, key in zip(problems, records, keys, strict=True)
    ]
    return EncodedPrompts(bad_input_named(lambda: within_limit(prompts, limit)), renderer.end_of_turn_ids)


class RolloutPrompts:
    """The prompts that each rollout step samples completions for.

    They depend only on `train.seed` and on the numbers of the step and the round. A resumed run therefore samples the
    same as an uninterrupted run.

    Attributes:
        end_of_turn_ids: The tokens with which chat templates end a completion. A mixture has those of all its data.
        loader: The loader of the prompts.

    Raises:
        ConfigError: There are fewer prompts than a step has, or one is too long for a completion.
    """

    def __init__(self, stage: StageConfig, algorithm: RolloutConfig, tokenizer: Tokenizer):
        self._rounds = algorithm.rounds_per_step
        self.end_of_turn_ids: tuple[int, ...] = ()
        wanted = algorithm.prompts_of_all_steps(stage.train)

        def build(name: str, of_component: StageConfig, source: DataSource[Any]) -> ItemList[EncodedPrompt]:
            encoded = encoded_prompts(of_component, source.problems(wanted), source.renderer(tokenizer))
            self.end_of_turn_ids = tuple(dict.fromkeys((*self.end_of_turn_ids, *encoded.end_of_turn_ids)))
            return ItemList([replace(prompt, data_set=name) for prompt in encoded.prompts])

        components = components_of(stage, build)
        self._first = [prompt for component in components for prompt in cast(ItemList, component.first).items]
        if len(self._first) < algorithm.prompts_per_step:
            raise ConfigError(
                f"algorithm.prompts_per_step={algorithm.prompts_per_step} exceeds the {len(self._first)} training "
                "problems; lower it, or provide more data"
            )
        self.loader = loader_of(stage, components, algorithm.prompts_per_step, _joined, self._rounds)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest prompt. Of streamed data, it is that of the first block."""
        return max(prompt.num_tokens for prompt in self._first)

    def at(self, step: int, round_: int = 0) -> list[EncodedPrompt]:
        """Return the prompts of a round of step `step` ≥ 1, as the rollout engine gets them."""
        return self.loader.batch((step - 1) * self._rounds + round_)


def _joined(parts: list[list[EncodedPrompt]], order: list[int]) -> list[EncodedPrompt]:
    prompts = [prompt for part in parts for prompt in part]
    return [prompts[place] for place in order]

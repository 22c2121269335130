"""What a stage trains on: its dataset and the order of its batches, or the problems whose prompts it samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_megatron.config.algorithms import RolloutConfig
from rl_megatron.config.errors import ConfigError, bad_input_named
from rl_megatron.config.schema import StageConfig, TrainConfig
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.encoding import EncodedPrompt, Limit, within_limit
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


def training_problems(stage: StageConfig, algorithm: RolloutConfig) -> list[Problem]:
    """Return the training problems: generated ones for all steps of the stage, or all that the source has."""
    return build_source(stage).problems(algorithm.prompts_of_all_steps(stage.train))


@dataclass(frozen=True)
class EncodedPrompts:
    """Prompts, as a rollout engine gets them for rollouts and for evaluations.

    Attributes:
        prompts: The prompts.
        end_of_turn_ids: The token with which the chat template ends a completion, or nothing.
    """

    prompts: list[EncodedPrompt]
    end_of_turn_ids: tuple[int, ...]


def encoded_prompts(stage: StageConfig, problems: Sequence[Problem], tokenizer: Tokenizer) -> EncodedPrompts:
    """Return the prompts of problems as tokens, with space for a completion behind each.

    `data.too_long` says what happens to a prompt that leaves too little space.

    Raises:
        ConfigError: A prompt is too long under "error", or none is left.
    """
    renderer, wanted = build_source(stage).renderer(tokenizer), stage.generation.max_new_tokens
    limit = Limit(
        stage.model.max_sequence_length - wanted,
        stage.data.too_long,
        noun="prompt",
        name=f"model.max_sequence_length={stage.model.max_sequence_length} without generation.max_new_tokens={wanted}",
        remedy="lower generation.max_new_tokens or raise model.max_sequence_length",
    )
    known: dict[tuple[str, str], EncodedPrompt] = {}  # generated problems repeat
    prompts = []
    for problem in problems:
        key = (problem.prompt, problem.location)
        if stage.data.prompt_template is not None or key not in known:
            known[key] = renderer.prompt(problem)
        prompts.append(known[key])
    return EncodedPrompts(bad_input_named(lambda: within_limit(prompts, limit)), renderer.end_of_turn_ids)


class RolloutPrompts:
    """The prompts that each rollout step samples completions for.

    They depend only on `train.seed` and on the numbers of the step and the round. A resumed run therefore samples the
    same as an uninterrupted run.

    Attributes:
        end_of_turn_ids: The token with which the chat template ends a completion, or nothing.

    Raises:
        ConfigError: There are fewer prompts than a step has, or one is too long for a completion.
    """

    def __init__(self, stage: StageConfig, algorithm: RolloutConfig, tokenizer: Tokenizer):
        self._rounds = algorithm.rounds_per_step
        encoded = encoded_prompts(stage, training_problems(stage, algorithm), tokenizer)
        self._prompts, self.end_of_turn_ids = encoded.prompts, encoded.end_of_turn_ids
        if len(self._prompts) < algorithm.prompts_per_step:
            raise ConfigError(
                f"algorithm.prompts_per_step={algorithm.prompts_per_step} exceeds the {len(self._prompts)} training "
                "problems; lower it, or provide more data"
            )
        self._order = BatchSchedule(len(self._prompts), algorithm.prompts_per_step, stage.train.seed)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest prompt."""
        return max(prompt.num_tokens for prompt in self._prompts)

    def at(self, step: int, round_: int = 0) -> list[EncodedPrompt]:
        """Return the different prompts of a round of step `step` ≥ 1, as the rollout engine gets them."""
        return [self._prompts[index] for index in self._order.items_at((step - 1) * self._rounds + round_)]

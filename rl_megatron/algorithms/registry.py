"""Algorithms by name: `algorithm.name` chooses one.

An algorithm is one object, registered beside its training loop. It declares its settings, what it learns from, what it
asks of a loss, the models it trains and its loop. Everything else in the package asks this object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rl_megatron.algorithms.stage import Stage
from rl_megatron.algorithms.training_data import check_dataset
from rl_megatron.config.algorithms import register_algorithm_config
from rl_megatron.config.registry import Registry
from rl_megatron.config.schema import AlgorithmConfig, OptimizerConfig, StageConfig, TrainConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.losses.contract import LossFunction
from rl_megatron.model.build import Head

ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)
TrainingLoop = Callable[[Stage, ConfigT], None]


@dataclass(frozen=True)
class LossNeeds:
    """What an algorithm asks of the loss that the loss section chooses.

    Attributes:
        uses: In words, what the loss must use for anything to be learned: "advantages".
        suits: Whether a loss uses it.
        batch_keys: The keys of the algorithm's batches.
        choices: The losses that suit, for messages: "dpo or ipo".
    """

    uses: str
    suits: Callable[[LossFunction], bool]
    batch_keys: frozenset[str]
    choices: str


@dataclass(frozen=True)
class CriticNeeds(Generic[ConfigT]):
    """What an algorithm's critic is: a second model of the policy's shape, with a score head.

    Attributes:
        optimizer: The critic's optimizer section.
        optimizer_steps: How many optimizer steps it takes.
        loss: The name and settings of its loss.
    """

    optimizer: Callable[[ConfigT], OptimizerConfig]
    optimizer_steps: Callable[[ConfigT, TrainConfig], int]
    loss: Callable[[ConfigT], Mapping[str, Any]]


@dataclass(frozen=True)
class Algorithm(Generic[ConfigT]):
    """An algorithm as the rest of the package sees it.

    Attributes:
        config: The class of its settings.
        run: Its training loop, called with the stage and the settings.
        loss: What it asks of the configured loss, or None if it always uses `fixed_loss`.
        fixed_loss: The registered loss of an algorithm that leaves no choice.
        head: The head of the policy: "lm", or "score" for a model of rewards.
        critic: What its critic is, or None if it has none.
        uses_reference: Whether a stage compares the policy with the one that it began as.
        check_data: Raises ConfigError if a stage's training data cannot serve, and returns for each item the tokens of
            its sequences.
        progress_metric: The training metric that the progress line always has.
    """

    config: type[ConfigT]
    run: TrainingLoop[ConfigT]
    loss: LossNeeds | None
    fixed_loss: str | None
    head: Head
    critic: CriticNeeds[ConfigT] | None
    uses_reference: Callable[[StageConfig], bool]
    check_data: Callable[[StageConfig, Tokenizer], Sequence[tuple[int, ...]]]
    progress_metric: str = "loss"

    def losses(self, stage: StageConfig) -> dict[str, Mapping[str, Any]]:
        """Return the loss sections of the stage's models: the policy's under "policy", the critic's under "critic"."""
        losses: dict[str, Mapping[str, Any]] = {}
        if self.loss is not None:
            losses["policy"] = stage.loss
        elif self.fixed_loss is not None:
            losses["policy"] = {"name": self.fixed_loss}
        if self.critic is not None:
            losses["critic"] = self.critic.loss(stage.algorithm)  # pyright: ignore[reportArgumentType] of this class
        return losses


ALGORITHMS: Registry[Algorithm[Any]] = Registry("algorithm")


def no_reference(stage: StageConfig) -> bool:
    """Return False: the algorithm has no reference policy."""
    return False


def register_algorithm(
    config: type[ConfigT],
    *,
    loss: LossNeeds | None = None,
    fixed_loss: str | None = None,
    head: Head = "lm",
    critic: CriticNeeds[ConfigT] | None = None,
    uses_reference: Callable[[StageConfig], bool] = no_reference,
    check_data: Callable[[StageConfig, Tokenizer], Sequence[tuple[int, ...]]] = check_dataset,
    progress_metric: str = "loss",
) -> Callable[[TrainingLoop[ConfigT]], TrainingLoop[ConfigT]]:
    """Return a decorator that registers a training loop as an algorithm.

    Args:
        config: A subclass of `AlgorithmConfig` under `@section`. The default of its key `name` is the name; it is
            registered too, if it is not already.
        loss, fixed_loss, head, critic, uses_reference, check_data, progress_metric: See `Algorithm`.

    Raises:
        TypeError: `config` is not strict, or has no name.
        ValueError: another algorithm has this name already.
    """
    name = register_algorithm_config(config).name

    def add(run: TrainingLoop[ConfigT]) -> TrainingLoop[ConfigT]:
        ALGORITHMS.register(name)(
            Algorithm(config, run, loss, fixed_loss, head, critic, uses_reference, check_data, progress_metric)
        )
        return run

    return add


def algorithm_of(stage: StageConfig) -> Algorithm[Any]:
    """Return the algorithm of a stage."""
    return ALGORITHMS[stage.algorithm.name]

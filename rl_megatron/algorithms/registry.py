"""The registry of algorithms; `algorithm.name` selects one.

An algorithm is one object, registered together with its training loop. It declares its settings, its requirements on a
loss, the models that it trains, and its loop. The rest of the package reads this object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rl_megatron.config.algorithm_kinds import register_algorithm_config
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.schema import AlgorithmConfig, StageConfig
from rl_megatron.config.train import TrainConfig
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import check_dataset
from rl_megatron.evaluation.heldout import metric_names
from rl_megatron.losses.contract import LossFunction
from rl_megatron.model.build import Head

ConfigT = TypeVar("ConfigT", bound=AlgorithmConfig)
TrainingLoop = Callable[..., None]


@dataclass(frozen=True)
class LossNeeds:
    """The requirements of an algorithm on the loss that the loss section selects.

    Attributes:
        uses: What the loss must use, as messages name it, such as "advantages".
        suits: Returns whether a loss uses what `uses` names.
        batch_keys: The keys of the algorithm's batches.
        choices: The losses that suit, as messages name them, such as "dpo or ipo".
    """

    uses: str
    suits: Callable[[LossFunction], bool]
    batch_keys: frozenset[str]
    choices: str


@dataclass(frozen=True)
class CriticNeeds(Generic[ConfigT]):
    """The declaration of an algorithm's critic, a second model of the policy's architecture with a score head.

    Attributes:
        optimizer: Returns the critic's optimizer section.
        optimizer_steps: Returns how many optimizer steps the critic takes.
        loss: Returns the name and settings of the critic's loss.
    """

    optimizer: Callable[[ConfigT], OptimizerConfig]
    optimizer_steps: Callable[[ConfigT, TrainConfig], int]
    loss: Callable[[ConfigT], Mapping[str, Any]]


@dataclass(frozen=True)
class Algorithm(Generic[ConfigT]):
    """The declaration of an algorithm.

    Attributes:
        config: The class of its settings.
        run: Its training loop, called with the stage (a `Loop`), the policy, the source of batches, the settings and
            any critic. The source is a `Sampler` if `config` is a `RolloutConfig`, and otherwise a `DataLoader` of the
            stage's training data.
        loss: Its requirements on the configured loss, or None if it always uses `fixed_loss`.
        fixed_loss: The registered loss of an algorithm whose loss cannot be chosen.
        head: The head of the policy: "lm", or "score" for a reward model.
        critic: The declaration of its critic, or None if it has none.
        uses_reference: Returns whether a stage uses a reference policy, which is a copy of its initial policy.
        check_data: Raises ConfigError if a stage's training data cannot be used; otherwise returns for each item the
            number of tokens of each of its sequences.
        progress_metric: The training metric that the progress line always shows.
    """

    config: type[ConfigT]
    run: TrainingLoop
    loss: LossNeeds | None
    fixed_loss: str | None
    head: Head
    critic: CriticNeeds[ConfigT] | None
    uses_reference: Callable[[StageConfig], bool]
    check_data: Callable[[StageConfig, Tokenizer], Sequence[tuple[int, ...]]]
    progress_metric: str = "loss"

    def losses(self, stage: StageConfig) -> dict[str, Mapping[str, object]]:
        """Return the loss sections of the stage's models, under "policy" and, if there is one, "critic"."""
        losses: dict[str, Mapping[str, object]] = {}
        if self.loss is not None:
            losses["policy"] = stage.loss
        elif self.fixed_loss is not None:
            losses["policy"] = {"name": self.fixed_loss}
        if self.critic is not None:
            losses["critic"] = self.critic.loss(stage.algorithm)  # pyright: ignore[reportArgumentType] of this class
        return losses


ALGORITHMS: Registry[Algorithm[Any]] = Registry("algorithm")


def no_reference(stage: StageConfig) -> bool:
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
) -> Callable[[TrainingLoop], TrainingLoop]:
    """Return a decorator that registers a training loop as an algorithm.

    Args:
        config: A subclass of `AlgorithmConfig` under `@section`. The default of its key `name` is the algorithm's name.
            The class is registered too, if it is not already.
        loss: As in `Algorithm`; so are the arguments below.
        fixed_loss: The registered loss of an algorithm whose loss cannot be chosen.
        head: The head of the policy.
        critic: The declaration of the critic.
        uses_reference: Returns whether a stage uses a reference policy.
        check_data: Checks a stage's training data.
        progress_metric: The training metric that the progress line always shows.

    Raises:
        TypeError: `config` is not declared with `@section`, or has no name.
        ValueError: Another algorithm has this name already.
    """
    name = register_algorithm_config(config).name

    def add(run: TrainingLoop) -> TrainingLoop:
        ALGORITHMS.register(name)(
            Algorithm(config, run, loss, fixed_loss, head, critic, uses_reference, check_data, progress_metric)
        )
        return run

    return add


def get_algorithm(stage: StageConfig) -> Algorithm[Any]:
    return ALGORITHMS[stage.algorithm.name]


def eval_metric_names(stage: StageConfig) -> tuple[str, ...]:
    """Return the names of a stage's eval metrics on its held-out data."""
    return metric_names(stage, has_reference=get_algorithm(stage).uses_reference(stage))

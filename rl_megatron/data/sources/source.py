"""What a data source is: the reader of what the data section of a stage names, to train and to evaluate on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import DataConfig, StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.tasks.task import Problem, Task
from rl_megatron.data.tokenizer import Tokenizer

ConfigT = TypeVar("ConfigT", bound=DataConfig)
PartT = TypeVar("PartT")


@dataclass(frozen=True)
class HeldoutBatch:
    """Held-out sequences, or pairs of them.

    Attributes:
        batch: The sequences. Those of a pair are neighbours, the chosen one first.
        tokens_per_character: Set if the sequences are plain text: what turns nats per token into nats per character.
    """

    batch: BatchedDataDict
    tokens_per_character: float | None = None


@dataclass(frozen=True)
class HeldoutProblemSet:
    """Held-out problems, and the task that rewards their answers."""

    task: Task
    problems: list[Problem]


class DataSource(Generic[ConfigT]):
    """Reads the data of one stage. A subclass registers itself for its config class and overrides what it provides.

    Attributes:
        stage: The stage's configuration.
        data: Its data section, an instance of the config class that the source is registered for.
    """

    def __init__(self, stage: StageConfig, data: ConfigT):
        self.stage, self.data = stage, data

    def texts(self) -> Iterator[str]:
        """Return the training text that a tokenizer can be trained on.

        Raises:
            ConfigError: the source has none; a run on it names a tokenizer.
        """
        raise ConfigError(f"data.source={self.data.source} has no text to train a tokenizer on; set tokenizer.path")

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the training data of a kind that becomes batches without the policy: documents, answers, pairs.

        Raises:
            ConfigError: the source has no data of this kind.
        """
        raise ConfigError(f"data.source={self.data.source} has no {kind}")

    def task(self) -> Task:
        """Return the task that rewards answers to the problems."""
        raise ConfigError(f"data.source={self.data.source} has no problems with rewards")

    def problems(self, wanted: int) -> list[Problem]:
        """Return the training problems: `wanted` of them if they are generated, otherwise all."""
        raise ConfigError(f"data.source={self.data.source} has no problems with rewards")

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch | HeldoutProblemSet:
        """Return what is held out of training, at most `data.num_eval_examples`, of the kind `data.heldout_kind`.

        Raises:
            ConfigError: nothing is held out.
        """
        raise ConfigError(f"data.source={self.data.source} has no held-out data: {type(self).__name__} lacks heldout()")


def heldout_part(parts: tuple[PartT, PartT], data: DataConfig) -> PartT:
    """Return the second of (training, held-out).

    Raises:
        ConfigError: nothing is held out.
    """
    if not parts[1]:
        raise ConfigError(
            f"data.heldout_fraction={data.heldout_fraction} holds nothing of data.path={data.path} out to measure on; "
            "set it above 0"
        )
    return parts[1]


def required_path(data: DataConfig) -> str:
    """Return `data.path`, which the configuration's rules require of this source."""
    if data.path is None:
        raise ConfigError(f"data.path is not set and data.source={data.source} reads it; add data.path=…")
    return data.path

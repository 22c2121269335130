"""`DataSource`: the interface of data sources, which read a stage's training and held-out data.

The modules of data sources do not import torch, so that a mistake in a path, a file or a template is found before torch
is imported. Datasets, which make tensors, are therefore imported in the methods that return them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import USUAL_EVAL_EXAMPLES, DataConfig, StageConfig
from rl_megatron.data.records import Record
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.tasks.task import Problem, Task
from rl_megatron.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rl_megatron.data.batch import BatchedDataDict
    from rl_megatron.data.datasets import Dataset

ConfigT = TypeVar("ConfigT", bound=DataConfig)
PartT = TypeVar("PartT")


@dataclass(frozen=True)
class HeldoutBatch:
    """Held-out sequences, or pairs of sequences.

    Attributes:
        batch: The sequences. The two of a pair are adjacent, the chosen one first.
        tokens_per_character: The factor that converts nats per token to nats per character. It is set only for plain
            text.
        locations: The location of each sequence's or pair's record, as file:line; empty if locations are unknown.
    """

    batch: BatchedDataDict
    tokens_per_character: float | None = None
    locations: tuple[str, ...] = ()


@dataclass(frozen=True)
class HeldoutProblemSet:
    """Held-out problems, and the task that rewards answers to them."""

    task: Task
    problems: list[Problem]


class DataSource(Generic[ConfigT]):
    """The reader of one stage's data.

    A subclass registers itself for its config class, and overrides the methods for the data that it provides.

    Attributes:
        stage: The stage's configuration.
        data: Its data section, an instance of the config class that the source is registered for.
    """

    def __init__(self, stage: StageConfig, data: ConfigT):
        self.stage, self.data = stage, data

    def renderer(self, tokenizer: Tokenizer) -> Renderer:
        """Return a renderer of the data section, which turns its records into tokens."""
        return Renderer(self.data, tokenizer)

    @property
    def num_left_out(self) -> int:
        """Return how many of the first training records are skipped, because they are held out."""
        return 0

    @property
    def num_held_out(self) -> int:
        """Return how many held-out records were taken from the training records (see `data.num_eval_examples`)."""
        return 0

    def first_record(self) -> Record | None:
        """Return the first training record, or None if the source has no records."""
        return None

    def check_files(self, tokenizer: Tokenizer | None) -> None:
        """Check everything that needs no torch: paths, records, the fields of templates, and a task's options.

        The command line calls it before torch is imported, so it must not import torch. Checks that need all data as
        tokens are made later, by `dataset` and `heldout`.

        Args:
            tokenizer: The run's tokenizer, or None if it has yet to be trained.

        Raises:
            ConfigError: A setting is wrong.
            ValueError: A file is wrong; the message names it.
            OSError: A file cannot be read.
        """

    def texts(self) -> Iterator[str]:
        """Yield the training text that a tokenizer can be trained on.

        Raises:
            ConfigError: The source has no such text, so that a tokenizer must be configured.
        """
        raise ConfigError(f"data.source={self.data.source} has no text to train a tokenizer on; set tokenizer.path")

    def dataset(self, kind: str, tokenizer: Tokenizer) -> Dataset:
        """Return the training data of a kind that needs no sampling from the policy: documents, answers or pairs.

        Args:
            kind: A kind in config/data.py, or one of the source's own.
            tokenizer: The run's tokenizer.

        Raises:
            ConfigError: The source has no data of this kind.
        """
        raise ConfigError(f"data.source={self.data.source} has no {kind}")

    def task(self) -> Task:
        """Return the task that rewards answers to the problems.

        Raises:
            ConfigError: The source has no problems.
        """
        raise ConfigError(f"data.source={self.data.source} has no problems with rewards")

    def problems(self, wanted: int) -> list[Problem]:
        """Return the training problems: `wanted` of them if they are generated, otherwise all.

        Raises:
            ConfigError: The source has no problems.
        """
        raise ConfigError(f"data.source={self.data.source} has no problems with rewards")

    def problems_to_check(self) -> list[Problem]:
        """Return the problems whose records are examined before the first step."""
        return self.problems(1)

    def heldout(self, tokenizer: Tokenizer) -> HeldoutBatch | HeldoutProblemSet:
        """Return the held-out data, of the kind `data.heldout_kind`: `data.num_eval_examples` sequences or problems.

        Raises:
            ConfigError: No data is held out.
        """
        raise ConfigError(f"data.source={self.data.source} has no held-out data: {type(self).__name__} lacks heldout()")


def require_heldout(parts: tuple[PartT, PartT], data: DataConfig) -> PartT:
    """Return the held-out part of (training, held-out); raise ConfigError if it is empty."""
    if not parts[1]:
        raise ConfigError(
            f"data.heldout_fraction={data.heldout_fraction} leaves nothing of data.path={data.path} to evaluate on; "
            "set it above 0"
        )
    return parts[1]


def count_evaluated(data: DataConfig, num_heldout: int, noun: str = "sequences") -> int:
    """Return how many of the held-out sequences, or problems, an evaluation uses. `noun` names them in messages."""
    number = data.num_eval_examples
    if number is None:
        return min(num_heldout, USUAL_EVAL_EXAMPLES)
    if number > num_heldout:
        raise ConfigError(
            f"data.num_eval_examples={number} exceeds the number of held-out {noun}, {num_heldout}; lower it, leave it "
            f"out to use all of them (at most {USUAL_EVAL_EXAMPLES}), or hold out more with data.heldout_fraction or "
            "data.eval_path"
        )
    return number

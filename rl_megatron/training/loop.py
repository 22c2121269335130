"""`Loop`: the interface with which a training loop iterates over steps, trains, logs metrics and keeps its state.

Between steps, the run evaluates, saves, and stops on request; `rl_megatron.runs.stage` implements it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rl_megatron.batching.batch import Batch
from rl_megatron.checkpoint.resumed_state import Resumable
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.datasets import Dataset
from rl_megatron.data.loader import DataLoader
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.losses.contract import LossFunction
from rl_megatron.timing import PhaseTimer
from rl_megatron.training.megatron_policy import MegatronPolicy
from rl_megatron.training.teacher import Teacher


class Closes(Protocol):
    """A part that the stage closes at its end."""

    def close(self) -> None:
        """Release its resources."""
        ...


class Loop(ABC):
    """One stage of a run, as its training loop sees it.

    Attributes:
        name: The stage's name.
        config: Its configuration.
        tokenizer: The run's tokenizer.
        timer: The time that each phase of a step takes.
    """

    name: str
    config: StageConfig
    tokenizer: Tokenizer
    timer: PhaseTimer

    @abstractmethod
    def steps(self) -> Iterator[int]:
        """Yield the step numbers 1 … train.steps, or those after the newest checkpoint of this stage if it is resumed.

        Between steps, the stage evaluates and saves checkpoints when they are due. After the last step it does both. If
        an evaluation reaches a goal of `train.stop_at`, no further step follows.

        Raises:
            RunStopped: The run ends early, after a checkpoint was saved.
        """

    @abstractmethod
    def batches(self, data: Dataset | DataLoader[BatchedDataDict]) -> Iterator[tuple[int, Batch]]:
        """Yield each step with its batch of `train.global_batch_size` sequences, in shuffled epochs. Collective.

        Each data-parallel replica reads an equal part of the batch, and sends each sequence to its owner, the rank that
        trains on it. A resumed stage gets the same batches as an uninterrupted one.
        """

    @abstractmethod
    def whole_batches(self, data: Dataset | DataLoader[BatchedDataDict]) -> Iterator[tuple[int, BatchedDataDict]]:
        """Yield the steps and batches of `batches`, with all sequences of a batch on every rank."""

    @abstractmethod
    def distinct_batches(self, data: Dataset | DataLoader[BatchedDataDict]) -> Iterator[BatchedDataDict]:
        """Yield the items that the stage's steps read, in batches. Each item occurs once, in the order of first use."""

    @abstractmethod
    def batch_number(self, step: int) -> int:
        """Return the number of a step's batch, counted from 1. After a roll-back, it is larger than the step number."""

    @property
    @abstractmethod
    def next_batch_number(self) -> int:
        """Return the number of the batch that follows the current step's batch."""

    @abstractmethod
    def train(
        self,
        step: int,
        batch: Mapping[str, object],
        loss_fn: LossFunction,
        model: MegatronPolicy | None = None,
        teacher: Teacher | None = None,
    ) -> dict[str, float]:
        """Train the policy (or `model`) on `batch` once, and return the metrics.

        Args:
            step: The step number, for messages.
            batch: The global batch: a `Batch`, or a dictionary that every rank has.
            loss_fn: The loss.
            model: The model to train instead of the policy, such as the critic.
            teacher: The model whose logits the loss reads as `teacher_logits`, or None.

        Raises:
            NonFiniteLoss: The loss is NaN or infinite; the message names the stage and step. Checkpoints are kept.
            RanksDiffer: A desync check found ranks with different batches or weights.
        """

    @abstractmethod
    def record(self, step: int, report: dict[str, float]) -> None:
        """Log the metrics of a step with its times, memory and throughput, and warn if they are unusual. Collective."""

    @abstractmethod
    def use_loader(self, loader: DataLoader[Any]) -> None:
        """Keep the position of `loader` in checkpoints, because steps read from it. Call it before `steps`."""

    @abstractmethod
    def keep(self, name: str, part: Resumable) -> None:
        """Keep the state of `part` in checkpoints, and restore it when the stage is resumed.

        Call it before `steps`. Names in use are "order", "roll_back", "schedule", "loader" and "sampler".

        Raises:
            ValueError: The stage keeps a part of this name already.
        """

    @abstractmethod
    def close_at_end(self, part: Closes) -> None:
        """Close `part` when the stage ends, before its rollout engine is closed."""

    @property
    @abstractmethod
    def reference_logprobs(self) -> Path:
        """Return the file of recorded logprobs of the stage's reference policy."""

    @property
    @abstractmethod
    def rollout_files(self) -> Path:
        """Return the directory of the stage's rollout files."""

"""NeMo RL's interface of environments, without Ray.

`rollout.environment.name` accepts a class with this interface. Its `step` is called for one trajectory at a time, so
batches have one element. Metrics come from `step`, and `global_post_process_and_metrics` is never called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

MetadataT = TypeVar("MetadataT")
LLMMessageLogType = list[dict[str, Any]]


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """An environment's answer to a batch of message logs.

    Attributes:
        observations: The environment's message for each log.
        metadata: The metadata of each log for its next step.
        next_stop_strings: The stop strings of each log's next turn, or None if it has none.
        rewards: The reward of each log's last turn, [B].
        terminateds: Whether each log is complete, [B].
        answers: The answer that was extracted from each log, or None if none was.
    """

    observations: list[dict[str, str]]
    metadata: list[MetadataT]
    next_stop_strings: list[list[str] | None]
    rewards: Tensor
    terminateds: Tensor
    answers: list[str | None] | None = None


class EnvironmentInterface(ABC, Generic[MetadataT]):
    """An environment that answers batches of message logs."""

    @abstractmethod
    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[MetadataT], *args: Any, **kwargs: Any
    ) -> EnvironmentReturn[MetadataT]:
        """Return the environment's answer to the last message of each log."""

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the batch and no metrics; this package never calls the method."""
        return batch, {}

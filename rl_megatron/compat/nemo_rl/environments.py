"""NeMo RL's interface of environments, without Ray.

`rollout.environment.name` takes a class of this interface. It answers one trajectory at a time, so its batches have one
element, and its metrics come from `step`: `global_post_process_and_metrics` is never called.
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
        observations: A message for each.
        metadata: What the next step gets for each.
        next_stop_strings: Texts that end the next turn of each, or None.
        rewards: The reward of each turn, [B].
        terminateds: Whether each is at its end, [B].
        answers: The answer that was read from each, or None.
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
        """Return the batch and no metrics; nothing calls it here."""
        return batch, {}

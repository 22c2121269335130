"""What a policy offers to algorithms: NeMo RL's policy interfaces, without Ray.

A policy is called on every rank with the same *global* batch and returns the same global result on every rank; how the
batch is spread over ranks is the policy's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypedDict

from torch import Tensor

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.contract import LossFunction


class LogprobOutputSpec(TypedDict):
    """logprobs [B, S] fp32: entry t is the logprob of token t; entry 0 is 0."""

    logprobs: Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """reference_logprobs [B, S] fp32: as `LogprobOutputSpec.logprobs`, of the reference policy."""

    reference_logprobs: Tensor


class TopkLogitsOutputSpec(TypedDict):
    """topk_logits [B, S, k] fp32, topk_indices [B, S, k] int64: entry t holds the k largest logits read after token t,
    and their ids, so it speaks of token t+1."""

    topk_logits: Tensor
    topk_indices: Tensor


class PolicyInterface(ABC):
    """A model that can be trained and asked for logprobs."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Logprobs of every token of `input_ids` given the tokens before it: a `LogprobOutputSpec`."""

    @abstractmethod
    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """The same under the frozen reference policy: a `ReferenceLogprobOutputSpec`."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step per `gbs` rows of `data`, `mbs` rows per forward; `eval_mode` computes without moving."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Puts modules into training mode and state where training needs it."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Ends a training phase: modules in evaluation mode, gradients dropped."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Writes weights, optimizer, scheduler and position so that training continues bitwise."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Releases what the policy holds; true when it did."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that shares its accelerators with a rollout engine and hands its weights over."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> Any:
        """Joins the process group over which weights reach the rollout engine."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Frees memory that the hand-over of weights needs."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Frees memory that the rollout engine needs."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Names, shapes and dtypes of the weights to come."""

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> Any:
        """Lays weights out for hand-over within a machine."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Handles of the named weights for another process of the machine."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> Any:
        """Sends all weights over the group of `init_collective`."""

"""The interface between policies and algorithms: NeMo RL's policy interfaces, without Ray.

Every rank calls a policy with the same *global* batch, a dictionary of tensors, and gets the same global result. The
policy itself distributes the batch over ranks. Alternatively, every rank passes the sequences that it owns (`Batch`),
and gets their results, with the metrics of all sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping
from typing import Any, TypedDict, TypeVar

from torch import Tensor

from rl_megatron.losses.contract import LossFunction

BatchT = TypeVar("BatchT", bound=MutableMapping[str, Any])
"""The class of a batch, and of the results of its sequences."""


class LogprobOutputSpec(TypedDict):
    """The result `logprobs` [B, S] fp32. Entry t is the logprob of token t, and entry 0 is 0."""

    logprobs: Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """The result `reference_logprobs` [B, S] fp32: `LogprobOutputSpec.logprobs` under the reference policy."""

    reference_logprobs: Tensor


class TopkLogitsOutputSpec(TypedDict):
    """The results `topk_logits` [B, S, k] fp32 and `topk_indices` [B, S, k] int64: the k largest logits and their ids.

    Entry t has the logits after token t, which predict token t+1.
    """

    topk_logits: Tensor
    topk_indices: Tensor


class PolicyInterface(ABC):
    """A model that can be trained and that computes logprobs."""

    @abstractmethod
    def get_logprobs(self, data: BatchT) -> BatchT:
        """Return the logprob of every token of `input_ids`, given the tokens before it, as a `LogprobOutputSpec`."""

    @abstractmethod
    def get_reference_policy_logprobs(self, data: BatchT) -> BatchT:
        """Return the logprobs under the frozen reference policy, as a `ReferenceLogprobOutputSpec`."""

    @abstractmethod
    def train(
        self,
        data: Mapping[str, Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step per `gbs` sequences of `data`, and return metrics.

        Args:
            data: The sequences, with everything that the loss reads.
            loss_fn: The loss.
            eval_mode: Compute the metrics only.
            gbs: The number of sequences per optimizer step.
            mbs: The number of sequences per forward pass.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Put modules into training mode, and move training state to the device."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """End a training phase: put modules into evaluation mode."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Write weights, optimizer, scheduler and data position, so that continued training is bitwise the same."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Release the policy's resources, and return whether there were any."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that shares its accelerators with a rollout engine, to which it sends its weights."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> Any:
        """Join the process group over which weights are sent to the rollout engine."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Free memory that the weight sync needs."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Free memory that the rollout engine needs."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Return the names, shapes and dtypes of the weights that will be sent."""

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare to share weights with other processes on the same machine."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Return handles of the named weights for another process on the same machine."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> Any:
        """Send all weights over the group of `init_collective`."""

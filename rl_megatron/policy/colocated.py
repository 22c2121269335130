"""The part of a policy that rollout engines see: handing weights over, and making room while an engine works."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_megatron.policy.interfaces import ColocatablePolicyInterface
from rl_megatron.policy.training_memory import allocate_gradients, free_gradients, move_optimizer_state
from rl_megatron.weight_sync.ipc import WeightHandle
from rl_megatron.weight_sync.plan import RefitPlan
from rl_megatron.weight_sync.process_group import Handle
from rl_megatron.weight_sync.sender import HandOver, Joining

if TYPE_CHECKING:
    from megatron.core.optimizer import MegatronOptimizer

    from rl_megatron.topology.topology import Topology


class ColocatedPolicy(ColocatablePolicyInterface):
    """Every method is called on every rank of the policy with the same arguments."""

    chunks: list[torch.nn.Module]
    optimizer: MegatronOptimizer | None
    topology: Topology

    def __init__(self) -> None:
        self.weight_version = 0
        """Another whenever the weights are others."""
        self._hand_over = HandOver(self)
        self._state_is_away = False  # the optimizer's, on the host

    # --- room ---

    def offload_before_refit(self) -> None:
        """Frees the gradient buffers, until `prepare_for_training`: buckets take their place."""
        self.finish_training()
        free_gradients(self.chunks, self.topology.is_cuda)

    def offload_after_refit(self) -> None:
        """Frees shared memory and gradient buffers and, on a GPU, moves the optimizer's state to the host, until
        `prepare_for_training`. The weights stay: logprobs need them. A CPU has nowhere else to put the state."""
        self.offload_before_refit()
        self._hand_over.release()
        if self.topology.is_cuda:
            if self.optimizer is not None and not self._state_is_away:
                move_optimizer_state(self.optimizer, self.chunks, torch.device("cpu"))
                self._state_is_away = True
            torch.cuda.empty_cache()

    def _bring_back(self, gradients: bool = True) -> None:
        """Undoes both."""
        if self._state_is_away:
            move_optimizer_state(self.optimizer, self.chunks, self.topology.device)
            self._state_is_away = False
        if gradients:
            allocate_gradients(self.chunks, self.topology.is_cuda)

    # --- weights ---

    @property
    def refit_plan(self) -> RefitPlan:
        """What an engine is told before the first weights come. Collective the first time."""
        return self._hand_over.plan

    def refit_metrics(self) -> dict[str, float]:
        """What the last hand-over took: see `RefitCost.metrics`. Complete once its handles were waited for."""
        return self._hand_over.cost.metrics()

    def prepare_refit_info(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each Hugging Face tensor to come, in order. `refit_plan` says all."""
        specs = (spec for bucket in self.refit_plan.buckets for spec in bucket.tensors)
        return {spec.name: (spec.shape, spec.torch_dtype) for spec in specs}

    def stream_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Name, whole tensor) of every Hugging Face tensor, on every rank; a tensor is there until the next one is
        asked for. Collective."""
        return self._hand_over.exporter().stream()

    def init_collective(self, ip: str, port: int, world_size: int, timeout_seconds: float = 600.0) -> list[Joining]:
        """Begins to join a process group of `world_size`, this policy's ranks first and engines after them, around
        `ip`:`port`, where the policy's rank 0 listens; a group joined before is left. Wait for the handles after the
        engines were told to join. `timeout_seconds`: for joining and for each collective.

        Raises: CollectiveFailed, from the handles, where somebody does not come.
        """
        return [self._hand_over.join(ip, port, world_size, timeout_seconds)]

    def broadcast_weights_for_collective(self) -> list[Handle]:
        """Sends all weights over the group of `init_collective`: a handle for each bucket, in order. Engines take part
        by `WeightReceiver.receive`.

        Raises: CollectiveFailed, here or from a handle, where an engine died; join again.
        """
        return self._hand_over.broadcast()

    def prepare_weights_for_ipc(self, max_bytes: int | None = None) -> list[list[str]]:
        """The groups of keys to ask `get_weights_ipc_handles` for, one after the other. Another `max_bytes` than before
        changes `refit_plan`: give engines the new one."""
        return self._hand_over.groups_of_keys(max_bytes)

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, WeightHandle]:
        """One group of keys in this rank's memory, by this rank's device: a GPU's uuid, or "cpu". A process of this
        machine reads it with `policy.weight_handles.opened`, and has to be done before the next group is asked for,
        which takes the same memory. `offload_after_refit`, and `prepare_for_training`, give it back."""
        return self._hand_over.share(keys)

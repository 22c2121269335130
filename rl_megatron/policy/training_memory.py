"""`TrainingMemory`: frees the device memory of training state while a rollout engine needs it, and restores it."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rl_megatron.checkpoint.optimizer_state import parts
from rl_megatron.model.sharded_model import ShardedModel


class TrainingMemory:
    """The placement of a model's gradient buffers and optimizer state: on the device, freed, or on the host.

    The weights stay on the device, because logprobs need them.
    """

    def __init__(self, model: ShardedModel, optimizer: MegatronOptimizer | None):
        self._model, self._optimizer = model, optimizer
        self._optimizer_is_offloaded = False

    def free_gradients(self) -> None:
        """Free the gradient buffers. The gradients are lost. A second call has no effect."""
        is_cuda = self._model.topology.is_cuda
        for model_chunk in self._model.wrapped_model_chunks:
            model_chunk.offload_grad_buffers(synchronize=is_cuda, empty_cache=is_cuda)

    def allocate_gradients(self) -> None:
        """Allocate the gradient buffers again, filled with zeros, if they were freed."""
        for model_chunk in self._model.wrapped_model_chunks:
            model_chunk.restore_grad_buffers(synchronize=self._model.topology.is_cuda)

    def offload_optimizer(self) -> None:
        """Move the optimizer state from a GPU to the host. This has no effect on the CPU."""
        if not self._model.topology.is_cuda:
            return
        if self._optimizer is not None and not self._optimizer_is_offloaded:
            move_optimizer_state(self._optimizer, self._model.model_chunks, torch.device("cpu"))
            self._optimizer_is_offloaded = True
        torch.cuda.empty_cache()

    def restore_optimizer(self) -> None:
        """Move the optimizer state back to the device if it was offloaded."""
        if self._optimizer is not None and self._optimizer_is_offloaded:
            move_optimizer_state(self._optimizer, self._model.model_chunks, self._model.topology.device)
            self._optimizer_is_offloaded = False

    def release(self) -> None:
        """Drop the reference to the optimizer, so that its state can be freed."""
        self._optimizer = None


@torch.no_grad()
def move_optimizer_state(
    optimizer: MegatronOptimizer, model_chunks: list[torch.nn.Module], device: torch.device
) -> None:
    """Move moments and fp32 master weights to `device`.

    megatron-core's own offload moves every tensor that the optimizer updates. In fp32 these are views of the model's
    weights. A moved view would become a copy, and the optimizer would train the copy. Here these views stay in place.
    """
    model_storages = {p.untyped_storage().data_ptr() for model_chunk in model_chunks for p in model_chunk.parameters()}
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in model_storages:
                    parameter.data = parameter.data.to(device)
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # Adam keeps its step count on the CPU
                    state[name] = value.to(device)

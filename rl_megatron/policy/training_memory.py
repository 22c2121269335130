"""`TrainingMemory`: training state leaves the device while a rollout engine needs the memory, and comes back."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rl_megatron.checkpoint.optimizer_state import parts
from rl_megatron.model.sharded_model import ShardedModel


class TrainingMemory:
    """The gradient buffers and the optimizer state of a model. It owns where they are.

    The weights stay on the device: logprobs need them.
    """

    def __init__(self, model: ShardedModel, optimizer: MegatronOptimizer | None):
        self._model, self._optimizer = model, optimizer
        self._optimizer_is_offloaded = False

    def free_gradients(self) -> None:
        """Give the memory of the gradient buffers back; their contents are lost. Doing it twice is harmless."""
        is_cuda = self._model.topology.is_cuda
        for model_chunk in self._model.wrapped_model_chunks:
            model_chunk.offload_grad_buffers(synchronize=is_cuda, empty_cache=is_cuda)

    def allocate_gradients(self) -> None:
        """Allocate the gradient buffers again, filled with zeros, if they were freed."""
        for model_chunk in self._model.wrapped_model_chunks:
            model_chunk.restore_grad_buffers(synchronize=self._model.topology.is_cuda)

    def offload_optimizer(self) -> None:
        """Move the optimizer state of a GPU to the host. On the CPU nothing moves: the host is the device."""
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
        """Forget the optimizer, so that nothing here keeps its state alive."""
        self._optimizer = None


@torch.no_grad()
def move_optimizer_state(
    optimizer: MegatronOptimizer, model_chunks: list[torch.nn.Module], device: torch.device
) -> None:
    """Move moments and fp32 master weights to `device`.

    megatron-core's own offload moves every tensor that the optimizer steps. In fp32 those are views of the model's
    weights, which would no longer be views: the optimizer would go on training a copy. They stay where they are here.
    """
    of_the_model = {p.untyped_storage().data_ptr() for model_chunk in model_chunks for p in model_chunk.parameters()}
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in of_the_model:
                    parameter.data = parameter.data.to(device)
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # a step count stays on the CPU, where Adam has it
                    state[name] = value.to(device)

"""`TrainingMemory`: frees the device memory of training state while a rollout engine needs that memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rl_megatron.checkpoint.optimizer_state import list_parts
from rl_megatron.model.sharded_model import ShardedModel


class TrainingMemory:
    """The placement of a model's gradient buffers and optimizer state: on the device, freed, or on the host.

    The weights stay on the device, because logprobs need them. This object owns the host copies of optimizer state.
    """

    def __init__(self, model: ShardedModel, optimizer: MegatronOptimizer | None):
        self._model, self._optimizer = model, optimizer
        self._gradients_are_free = False
        self._optimizer_is_offloaded = False
        self._host_copies: list[Tensor] = []

    def free_gradients(self) -> None:
        """Free the gradient buffers. The gradients are lost. A second call has no effect."""
        if self._gradients_are_free:
            return
        is_cuda = self._model.topology.is_cuda
        for model_chunk in self._model.wrapped_model_chunks:
            model_chunk.offload_grad_buffers(synchronize=is_cuda, empty_cache=is_cuda)
        self._gradients_are_free = True

    def allocate_gradients(self) -> None:
        """Allocate the gradient buffers again, filled with zeros, if they were freed."""
        if not self._gradients_are_free:
            return
        for model_chunk in self._model.wrapped_model_chunks:
            # The stream zeroes the buffers before it runs the step, so the host does not have to wait.
            model_chunk.restore_grad_buffers(synchronize=False)
        self._gradients_are_free = False

    def offload_optimizer(self) -> None:
        """Move the optimizer state from a GPU to the host. This has no effect on the CPU.

        The host memory is pinned, because a GPU then copies at the full speed of its link. It is allocated once.
        """
        if not self._model.topology.is_cuda:
            return
        if self._optimizer is not None and not self._optimizer_is_offloaded:
            states = list(offloadable_states(self._optimizer, self._model.model_chunks))
            if not self._host_copies:
                self._host_copies = [torch.empty_like(s.tensor, device="cpu", pin_memory=True) for s in states]
            move_states(states, self._host_copies)
            self._optimizer_is_offloaded = True
        torch.cuda.empty_cache()

    def restore_optimizer(self) -> None:
        """Move the optimizer state back to the device if it was offloaded."""
        if self._optimizer is not None and self._optimizer_is_offloaded:
            states = list(offloadable_states(self._optimizer, self._model.model_chunks))
            device = self._model.topology.device
            move_states(states, [torch.empty_like(state.tensor, device=device) for state in states])
            self._optimizer_is_offloaded = False

    def release(self) -> None:
        """Drop the optimizer and the host copies of its state, so that they can be freed."""
        self._optimizer = None
        self._host_copies = []


@dataclass(frozen=True)
class OptimizerTensor:
    """A tensor of an optimizer's state, and a function that replaces it."""

    tensor: Tensor
    replace: Callable[[Tensor], None]


def offloadable_states(optimizer: MegatronOptimizer, model_chunks: list[torch.nn.Module]) -> Iterator[OptimizerTensor]:
    """Yield moments and fp32 master weights, always in the same order.

    megatron-core's own offload moves every tensor that the optimizer updates. In fp32 these are views of the model's
    weights. A moved view would become a copy, and the optimizer would train the copy. Here these views stay in place.
    """
    model_storages = {p.untyped_storage().data_ptr() for model_chunk in model_chunks for p in model_chunk.parameters()}
    for part in list_parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in model_storages:
                    yield OptimizerTensor(parameter.data, partial(setattr, parameter, "data"))
                state = part.optimizer.state[parameter]
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() > 0:  # a scalar step count stays in place
                        yield OptimizerTensor(value, partial(state.__setitem__, name))


@torch.no_grad()
def move_states(states: list[OptimizerTensor], targets: list[Tensor]) -> None:
    """Copy each state to its target, and replace it by the target."""
    for state, target in zip(states, targets, strict=True):
        state.replace(target.copy_(state.tensor, non_blocking=True))
    if any(target.is_cuda or state.tensor.is_cuda for state, target in zip(states, targets, strict=True)):
        torch.cuda.current_stream().synchronize()  # the host may read or write its copies from now on

"""What of a training state has to be on the device while a rollout engine works there: nothing but the weights."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rl_megatron.checkpoint.optimizer_state import parts


def free_gradients(chunks: list[torch.nn.Module], is_cuda: bool) -> None:
    """Gives the gradient buffers' memory back; what they held is lost. Doing it twice is harmless."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            chunk.offload_grad_buffers(synchronize=is_cuda, empty_cache=is_cuda)


def allocate_gradients(chunks: list[torch.nn.Module], is_cuda: bool) -> None:
    """Zeros, where `free_gradients` has been; nothing elsewhere."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            chunk.restore_grad_buffers(synchronize=is_cuda)


@torch.no_grad()
def move_optimizer_state(optimizer: MegatronOptimizer, chunks: list[torch.nn.Module], device: torch.device) -> None:
    """Moments and fp32 master weights to `device`.

    megatron-core's own offload moves every tensor that the optimizer steps. In fp32 those are views of the model's
    weights, which would cease to be: the optimizer would go on training a copy. They stay where they are here.
    """
    of_the_model = {p.untyped_storage().data_ptr() for chunk in chunks for p in chunk.parameters()}
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.untyped_storage().data_ptr() not in of_the_model:
                    parameter.data = parameter.data.to(device)
        for state in part.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() > 0:  # a step count stays on the CPU, where Adam has it
                    state[name] = value.to(device)

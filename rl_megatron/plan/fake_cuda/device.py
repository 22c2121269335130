"""The context in which one rank of a job runs on fake GPUs."""

from __future__ import annotations

import functools
import sys
from contextlib import ExitStack
from typing import Self

import torch.distributed as dist

from rl_megatron.config.errors import ConfigError
from rl_megatron.plan.fake_cuda.functions import Functions
from rl_megatron.plan.fake_cuda.operators import Operators
from rl_megatron.plan.fake_cuda.patches import list_replacements, patch_attribute
from rl_megatron.plan.fake_cuda.sides import Observer, Sides, activate, is_active
from rl_megatron.topology.cuda_on_cpu import is_redirected


class FakeCuda:
    """A context in which one rank of a job runs on fake GPUs, without its peers.

    Args:
        rank: The rank that runs.
        world_size: The number of ranks of the job.
        observer: Is called for operators, allocations, collectives and waits.

    Raises:
        ConfigError: This process already uses the CPU as its device, or has joined a process group.
    """

    def __init__(self, rank: int, world_size: int, observer: Observer | None = None):
        self.rank, self.world_size, self.sides = rank, world_size, Sides(observer or Observer())
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        """Start the device, and join a process group without peers."""
        if is_redirected() or dist.is_initialized() or is_active():
            raise ConfigError("plan: this process has started a device; start a new process to plan")
        activate(self.sides)
        self._undo.callback(activate, None)
        self._undo.callback(clear_caches)
        try:
            functions = Functions(self.sides)
            for owner, name, replacement in list_replacements(self.sides, functions):
                self._undo.enter_context(patch_attribute(owner, name, replacement))
            from torch.testing._internal.distributed.fake_pg import FakeStore

            dist.init_process_group("fake", rank=self.rank, world_size=self.world_size, store=FakeStore())
            self._undo.callback(_leave)
            self._undo.enter_context(Operators(self.sides))
            self._undo.enter_context(functions)
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore everything that was replaced."""
        self._undo.close()


def clear_caches() -> None:
    """Clear the caches of this package's functions, which may hold tensors."""
    for name, module in list(sys.modules.items()):
        if name.startswith("rl_megatron."):
            for function in list(vars(module).values()):
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()


def _leave() -> None:
    if dist.is_initialized():  # `topology.leave` may have left already
        dist.destroy_process_group()

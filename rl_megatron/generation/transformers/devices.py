"""The devices of rollout engines that run in separate processes."""

from __future__ import annotations

import os

import torch

from rl_megatron.config.engines import opens_memory
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import GenerationConfig


def choose_engine_devices(settings: GenerationConfig, policy: torch.device) -> list[str]:
    """Return the device of each engine. `policy` is the device of the policy's rank 0.

    Raises:
        ConfigError: Weights cannot be sent to the device, or this machine has no such device.
    """
    kind, _, first = settings.engine_device.partition(":")
    count = settings.num_engines
    if kind == "cpu" or (kind == "auto" and policy.type == "cpu"):
        if policy.type == "cuda" and settings.refit == "collective":
            raise ConfigError(
                "generation.engine_device=cpu and generation.refit=collective: the policy's GPUs cannot share a "
                "process group with a CPU; set generation.refit=shared_memory, or another engine_device"
            )
        return ["cpu"] * count
    if kind == "auto" and opens_memory(settings):
        return [str(policy)] * count
    if kind == "auto":
        first = os.environ.get("LOCAL_WORLD_SIZE", "1")
    last, available = int(first or 0) + count - 1, torch.cuda.device_count()
    if last >= available:
        raise ConfigError(
            f"generation.engine_device={settings.engine_device} and generation.num_engines={count}: the last engine "
            f"would compute on cuda:{last}, but this machine has {available} GPUs; set a lower cuda:N or num_engines, "
            "leave GPUs to the engines by starting fewer ranks, or set engine_device=cpu with refit=shared_memory"
        )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if policy.type == "cuda" and settings.refit == "collective" and last - count + 1 < ranks:
        raise ConfigError(
            f"generation.engine_device={settings.engine_device} and generation.refit=collective: engines would share "
            f"cuda:{last - count + 1} with a rank, but NCCL takes one process per GPU; set engine_device=cuda:{ranks} "
            "or higher, or refit=shared_memory"
        )
    return [f"cuda:{last - count + 1 + index}" for index in range(count)]

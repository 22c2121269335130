"""Check that a node can start inference servers for a stage, and choose their GPUs."""

from __future__ import annotations

import os
import shutil

import torch

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.generation import ServersConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.model.families import family_of_model


def check_servers(
    stage: StageConfig, vocab_size: int, settings: ServersConfig, python: str, length_key: str, remedy: str
) -> None:
    """Check that Hugging Face's format can express the model, that the length limit suits it, and that servers start.

    `python` is the program that starts the servers; if it is missing, the message ends with `remedy`. `length_key` is
    the key with the servers' limit on the length of sequences.

    Raises:
        ConfigError: Something is missing; the message names the key.
    """
    try:
        family_of_model(stage.model, stage.model.vocab_size or vocab_size)
    except ConfigError as error:
        raise ConfigError(
            f"generation.engine={stage.generation.engine}: {error}; set generation.engine=embedded"
        ) from error
    longest, length = stage.model.max_sequence_length, getattr(settings, length_key)
    if length is not None and length > longest:
        raise ConfigError(
            f"{settings.key}.{length_key}={length} exceeds model.max_sequence_length={longest}; lower it, or leave it "
            "out"
        )
    if not settings.urls and shutil.which(python) is None:
        raise ConfigError(f"{settings.key}.python={python} cannot be found: {remedy}")


def choose_server_devices(
    settings: ServersConfig, size_key: str, policy: torch.device, shared: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Return, for each server that a node starts, its GPU numbers; empty on a CPU, or if servers run already.

    Args:
        settings: The section of the servers.
        size_key: The section's key with the number of GPUs of a server.
        policy: The device of the policy.
        shared: Whether servers use the ranks' GPUs, from number 0 on. If not, the servers' GPUs follow the ranks'.

    Raises:
        ConfigError: This machine has too few GPUs.
    """
    if policy.type == "cpu" or settings.urls:
        return ()
    count, size = settings.num_servers, getattr(settings, size_key)
    first = 0 if shared else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    available = torch.cuda.device_count()
    if first + count * size > available:
        raise ConfigError(
            f"{settings.key}.num_servers={count} and {settings.key}.{size_key}={size} need {count * size} GPUs from "
            f"number {first} on, but this machine has {available}; lower them, start fewer ranks, or choose "
            "generation.engine=vllm with generation.refit=shared_memory, with which servers and ranks share GPUs"
        )
    return tuple(tuple(range(first + index * size, first + (index + 1) * size)) for index in range(count))

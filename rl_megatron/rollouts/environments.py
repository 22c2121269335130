"""The environments of trajectories, in processes of their own, as rollout workers on rank 0 use them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rl_megatron.config.environments import EnvironmentConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import is_import_string
from rl_megatron.data.conversations import Message
from rl_megatron.rollouts import environment_adapter
from rl_megatron.rollouts.environment import EnvironmentStep
from rl_megatron.rollouts.host_pool import HostedCallFailed, HostedObject, HostLimits, HostLost, ProcessHosts

_MOST_PROCESSES = 32  # of rollout.environment.processes=null
_ADAPTER = environment_adapter.__name__
_MEBIBYTE = 1 << 20


class Environment:
    """The environment of one trajectory."""

    def __init__(self, hosted: HostedObject, seconds_per_call: float):
        """Keep where it is; `Environments.make` makes it there."""
        self._hosted, self._seconds = hosted, seconds_per_call

    async def reset(
        self, record: Mapping[str, Any], messages: Sequence[Message]
    ) -> tuple[list[Message] | None, dict[str, Any]]:
        """Begin a trajectory; return its first messages (None: those of the prompt) and its metadata.

        Args:
            record: The fields of the problem's record.
            messages: The messages of the prompt.

        Raises:
            HostedCallFailed: The environment failed, or returned something else.
            HostLost: Its process ended through no fault of its own.
        """
        observation, metadata = await self._hosted.call("reset", dict(record), list(messages), timeout=self._seconds)
        return observation, metadata

    async def step(self, answer: str) -> EnvironmentStep:
        """Return what the environment says to an answer of the policy. It raises what `reset` raises."""
        return EnvironmentStep(**await self._hosted.call("step", answer, timeout=self._seconds))

    async def close(self) -> None:
        """Close the environment, and forget it."""
        await self._hosted.close()


class Environments:
    """What makes an environment for each trajectory, and owns their processes."""

    def __init__(self, settings: EnvironmentConfig):
        """Start no process yet.

        Args:
            settings: The section `rollout.environment`, with a name.
        """
        self._settings, self._hosts = settings, environment_hosts(settings)

    async def make(self) -> Environment:
        """Return a new environment.

        Raises:
            HostedCallFailed: It cannot be made.
            HostLost: Its process ended through no fault of its own.
        """
        settings = self._settings
        kwargs = {"target": settings.name, "kwargs": settings.kwargs}
        seconds, shown = settings.seconds_per_call, f"environment {settings.name}"
        imports = [str(settings.name)] if is_import_string(settings.name) else []
        hosted = await self._hosts.make(f"{_ADAPTER}:make", kwargs, seconds, shown, imports)
        return Environment(hosted, seconds)

    def close(self) -> None:
        """End the processes."""
        self._hosts.close()


def check_environment(settings: EnvironmentConfig) -> None:
    """Load the environment in a process of its own, and check that it is one.

    Raises:
        ConfigError: It cannot be loaded, it is no environment, or it takes other arguments.
    """
    if settings.name is None:
        return
    with ThreadPoolExecutor(1) as thread:  # a notebook's thread has an asyncio loop of its own
        thread.submit(asyncio.run, _check(settings)).result()


async def _check(settings: EnvironmentConfig) -> None:
    hosts, what = environment_hosts(settings), f"{_ADAPTER}:check"
    try:
        await hosts.call(what, {"target": settings.name, "kwargs": settings.kwargs}, settings.seconds_per_call)
    except (HostedCallFailed, HostLost) as error:
        said = str(error).removeprefix(f"{what}() in a worker process ")
        named = said.startswith("rollout.environment.name")
        raise ConfigError(said if named else f"rollout.environment.name={settings.name} {said}") from error
    finally:
        hosts.close()


def environment_hosts(settings: EnvironmentConfig) -> ProcessHosts:
    """Return the processes of the section `rollout.environment`. None is started yet."""
    count = settings.processes or min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    limits = HostLimits(settings.memory_mb, int(settings.max_answer_mb * _MEBIBYTE))
    return ProcessHosts(count, limits, "environments", settings.python)

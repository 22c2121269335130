"""The environments of trajectories in separate processes, for rollout workers on rank 0."""

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
from rl_megatron.rollouts.hosts import HostedCallFailed, HostedObject, HostLimits, HostLost, ProcessHosts

_MOST_PROCESSES = 32  # if rollout.environment.processes=null
_ADAPTER = environment_adapter.__name__
_MEBIBYTE = 1 << 20


class Environment:
    """The environment of one trajectory."""

    def __init__(self, hosted: HostedObject, seconds_per_call: float):
        """Use an object that `Environments.make` has created."""
        self._hosted, self._seconds = hosted, seconds_per_call

    async def reset(
        self, record: Mapping[str, object], messages: Sequence[Message]
    ) -> tuple[list[Message] | None, dict[str, Any]]:
        """Begin a trajectory; return its first messages (None: those of the prompt) and its metadata.

        `messages` are those of the prompt.
        """
        observation, metadata = await self._hosted.call("reset", dict(record), list(messages), timeout=self._seconds)
        return observation, metadata

    async def step(self, answer: str) -> EnvironmentStep:
        """Return the environment's response to an answer of the policy."""
        return EnvironmentStep(**await self._hosted.call("step", answer, timeout=self._seconds))

    async def close(self) -> None:
        await self._hosted.close()


class Environments:
    """The environments of trajectories, with the processes that hold them."""

    def __init__(self, settings: EnvironmentConfig):
        """Start no process yet. `settings.name` must be set."""
        self._settings, self._hosts = settings, build_environment_hosts(settings)

    async def make(self) -> Environment:
        settings = self._settings
        kwargs = {"target": settings.name, "kwargs": settings.kwargs}
        seconds, shown = settings.seconds_per_call, f"environment {settings.name}"
        imports = [str(settings.name)] if is_import_string(settings.name) else []
        hosted = await self._hosts.make(f"{_ADAPTER}:make", kwargs, seconds, shown, imports)
        return Environment(hosted, seconds)

    def close(self) -> None:
        self._hosts.close()


def check_environment(settings: EnvironmentConfig) -> None:
    """Load the environment in a separate process, and check that it is one and takes the configured arguments."""
    if settings.name is not None:
        kwargs = {"target": settings.name, "kwargs": settings.kwargs}
        check_in_process(settings, f"{_ADAPTER}:check", kwargs, settings.seconds_per_call)


def check_in_process(settings: EnvironmentConfig, function: str, kwargs: Mapping[str, object], seconds: float) -> None:
    """Run, in a separate process, a function that checks the environment; raise ConfigError if the check fails."""
    with ThreadPoolExecutor(1) as thread:  # in a notebook, an asyncio loop already runs in this thread
        thread.submit(asyncio.run, _check(settings, function, kwargs, seconds)).result()


async def _check(settings: EnvironmentConfig, function: str, kwargs: Mapping[str, object], seconds: float) -> None:
    hosts = build_environment_hosts(settings)
    try:
        await hosts.call(function, kwargs, seconds)
    except (HostedCallFailed, HostLost) as error:
        failure = str(error).removeprefix(f"{function}() in a worker process ")
        is_named = failure.startswith("rollout.environment.name")
        raise ConfigError(failure if is_named else f"rollout.environment.name={settings.name} {failure}") from error
    finally:
        hosts.close()


def build_environment_hosts(settings: EnvironmentConfig) -> ProcessHosts:
    """Return the processes of the section `rollout.environment`, without starting one."""
    count = settings.processes or min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    limits = HostLimits(settings.memory_mb, int(settings.max_answer_mb * _MEBIBYTE))
    return ProcessHosts(count, limits, "environments", settings.python)

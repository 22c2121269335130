"""The rollout worker `verifiers`: an environment of the library `verifiers` drives the policy through the gateway."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rl_megatron.config.environments import EnvironmentConfig
from rl_megatron.data.tasks.verifiers import EXAMPLE
from rl_megatron.generation.interfaces import Sampling
from rl_megatron.rollouts import hosted_verifiers
from rl_megatron.rollouts.client import RolloutClient
from rl_megatron.rollouts.environments import build_environment_hosts, check_in_process
from rl_megatron.rollouts.runner import run_within_limit
from rl_megatron.rollouts.trajectory import Trajectory

_HOSTED = hosted_verifiers.__name__
_SECONDS_TO_LOAD = 600.0  # to load an environment, which may download its dataset
_KEY = "rollout.environment.seconds_per_call"


class VerifiersWorker:
    """The worker whose environment (`rollout.environment`) drives the policy. Each process loads it once."""

    def __init__(self, settings: EnvironmentConfig):
        """Start no process yet. `settings.name` must be set."""
        self._settings, self._hosts = settings, build_environment_hosts(settings)

    async def rollout(
        self, client: RolloutClient, record: Mapping[str, object], sampling: Sampling
    ) -> list[Trajectory]:
        """Run one rollout of the environment, and return the trajectory of its requests."""
        settings = self._settings
        example = record.get(EXAMPLE)
        if example is None:
            example = hosted_verifiers.build_example(record, client.history().messages)
        async with client.openai(sampling=sampling) as session:
            kwargs = {"name": settings.name, "kwargs": settings.kwargs}
            shown = f"environment {settings.name}"
            hosted = await self._hosts.make(f"{_HOSTED}:make", kwargs, _SECONDS_TO_LOAD, shown)
            try:
                call = hosted.call(
                    "rollout", example, session.base_url, session.api_key,
                    timeout=settings.seconds_per_call, waits=math.inf,
                )  # fmt: skip
                outcome = await run_within_limit(call, settings.seconds_per_call, client, _KEY)
            finally:
                await hosted.close()
            metadata = {"metrics": outcome["metrics"], "stop_condition": outcome["stop_condition"]}
            truncated = True if outcome["truncated"] else None
            return [session.trajectory(outcome["reward"], truncated=truncated, metadata=metadata)]

    def close(self) -> None:
        self._hosts.close()


def check_verifiers(settings: EnvironmentConfig) -> None:
    """Load the environment in a separate process, or raise ConfigError."""
    kwargs = {"name": settings.name, "kwargs": settings.kwargs}
    check_in_process(settings, f"{_HOSTED}:check", kwargs, _SECONDS_TO_LOAD)

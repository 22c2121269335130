"""Hold an environment of `verifiers` in a process for users' code, which may use another interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.data.conversations import Message
from rl_megatron.data.verifiers import VerifiersEnvironment, load

_FIELDS = ("info", "task", "example_id")  # of an example, besides prompt and answer


class HostedRollout:
    """One trajectory of an environment that all trajectories of the process share."""

    def __init__(self, environment: VerifiersEnvironment):
        self._environment = environment

    async def rollout(self, example: Mapping[str, object], base_url: str, api_key: str) -> dict[str, Any]:
        """Run one rollout, as `VerifiersEnvironment.rollout` describes."""
        return await self._environment.rollout(example, base_url, api_key)


async def make(name: str, kwargs: Mapping[str, object]) -> HostedRollout:
    """Return a rollout of the environment, which this process loads once."""
    return HostedRollout(load(name, kwargs))


def check(name: str, kwargs: Mapping[str, object]) -> None:
    """Load the environment, or raise ConfigError."""
    load(name, kwargs)


def build_example(record: Mapping[str, object], messages: Sequence[Message]) -> dict[str, Any]:
    """Return the example for a record that is not from the environment; `messages` are its prompt."""
    example = {"prompt": list(messages), "answer": str(record.get("answer", "")), "info": {}, "example_id": 0}
    return example | {name: record[name] for name in _FIELDS if record.get(name) is not None}

"""Environments of `verifiers` that have a dataset and a rubric: single turns, several turns, and tools."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from rl_megatron.config.errors import ConfigError

MODEL = "policy"  # the gateway takes any name
_OF_THE_LIBRARY = ("reward",)  # metrics that repeat the reward


class RolloutFailed(RuntimeError):
    """A rollout of the environment ended with an error, or with a reward that is not a number."""


class ClassicEnvironment:
    """An environment with the method `run_rollout`, in `verifiers` up to 0.3."""

    def __init__(self, environment: Any, name: str):
        """Keep the environment.

        Raises:
            ConfigError: Its rewards compare the rollouts of a group.
        """
        if getattr(environment, "requires_group_rollouts", False):
            raise ConfigError(
                f"rollout.environment.name={name} scores whole groups of rollouts, and a rollout is scored alone here; "
                "use reward functions that score one"
            )
        # These imports take seconds, and no rollout's time.
        from verifiers.clients import OpenAIChatCompletionsClient  # pyright: ignore[reportMissingImports]

        self._environment, self._client_class = environment, OpenAIChatCompletionsClient
        self._openai = _shared_client()

    def examples(self, is_heldout: bool, limit: int | None) -> list[dict[str, Any]]:
        """Return the examples of the environment's dataset, or of its dataset for evaluation."""
        own = self._environment
        source, dataset = ("eval_dataset_source", "eval_dataset") if is_heldout else ("dataset_source", "dataset")
        if getattr(own, source, None) is None and getattr(own, dataset, None) is None:
            return []
        read = own.get_eval_dataset if is_heldout else own.get_dataset
        return [_example(each) for each in itertools.islice(read(), limit)]

    async def rollout(self, example: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Run one rollout, and return what the environment says about it.

        Raises:
            RolloutFailed: It ended with an error, or its reward is not a finite number.
        """
        client = self._client_class(self._openai.with_options(base_url=base_url, api_key=api_key))
        output = await self._environment.run_rollout(dict(example), client, MODEL, {})
        if output.get("error"):
            raise RolloutFailed(f"the rollout ended with an error: {_said(output['error'])}")
        metrics = {name: value for name, value in (output.get("metrics") or {}).items() if name not in _OF_THE_LIBRARY}
        return {
            "reward": finite_reward(output.get("reward")),
            "metrics": metrics,
            "truncated": bool(output.get("is_truncated")),
            "stop_condition": output.get("stop_condition"),
        }


def _shared_client() -> Any:
    """Return an OpenAI client, whose connections all rollouts of this process share.

    The number of connections has no limit: a request that waits for one would not reach the gateway, whose round waits
    for all requests.
    """
    import openai

    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=100)
    http = openai.DefaultAsyncHttpxClient(limits=limits, timeout=None)
    return openai.AsyncOpenAI(
        base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None, http_client=http
    )


def finite_reward(reward: Any) -> float:
    """Return a reward as a number.

    Raises:
        RolloutFailed: It is not a finite number.
    """
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise RolloutFailed(f"the environment gave the reward {reward!r:.80}; a reward is a finite number")
    return float(reward)


def _example(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example of a dataset without its empty fields, which tables add."""
    return json.loads(json.dumps({name: value for name, value in found.items() if value is not None}, default=str))


def _said(error: Any) -> str:
    if isinstance(error, Mapping):
        return str(error.get("error_chain_str") or error.get("error_chain_repr") or error.get("error") or dict(error))
    return str(error)

"""Environments of `verifiers` from 0.3.1 on: a taskset and the program, called a harness, that answers its tasks."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.verifiers.classic import MODEL, RolloutFailed, finite_reward

_numbers = itertools.count()


def made_of_a_taskset(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the environment of an installed taskset.

    Args:
        name: The name of the taskset.
        kwargs: The keys of the environment's configuration, such as `agent` and `taskset`.
    """
    import verifiers.v1 as library  # pyright: ignore[reportMissingImports]

    taskset = {**(kwargs.get("taskset") or {}), "id": name}
    return library.load_environment(library.resolve_env_config({**kwargs, "taskset": taskset}))


class TasksetEnvironment:
    """An environment with the method `run_episode`. Each rollout has servers of its own, as each has its own key."""

    def __init__(self, environment: Any, name: str):
        """Keep the environment, whose configuration each rollout uses."""
        self._environment, self._name = environment, name
        self._tasks: list[Any] = []
        self._rest = iter(environment.taskset)

    def examples(self, is_heldout: bool, limit: int | None) -> list[dict[str, Any]]:
        """Return the tasks of the taskset, each with its number. A taskset has none for evaluation."""
        if is_heldout:
            return []
        taskset = self._environment.taskset
        is_bounded = getattr(taskset, "bounded", not taskset.INFINITE)  # 0.3.1 has no views with an end of their own
        if limit is None and not is_bounded:
            raise ConfigError(
                f"rollout.environment.name={self._name} has tasks without an end; set data.task.max_examples"
            )
        tasks = enumerate(itertools.islice(taskset, limit))
        return [_example(number, task.data.model_dump(mode="json")) for number, task in tasks]

    async def rollout(self, example: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Run one episode, and return what its task says about it.

        Raises:
            RolloutFailed: It ended with an error, or has the rewards of several agents, or no finite one.
        """
        import verifiers.v1 as library  # pyright: ignore[reportMissingImports]

        task = self._task(example)
        environment = type(self._environment)(self._environment.config)
        variable = f"RL_MEGATRON_SESSION_{next(_numbers)}"  # the library reads keys from variables only
        os.environ[variable] = api_key
        try:
            client = library.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = library.ModelContext(model=MODEL, client=client)
            async with environment.serving():
                episode = await environment.run_episode(task, context)
        finally:
            del os.environ[variable]
        return _outcome(episode)

    def _task(self, example: Mapping[str, Any]) -> Any:
        """Return the task of an example.

        Raises:
            RolloutFailed: The example is not one of the taskset.
        """
        number = example.get("number")
        if not isinstance(number, int) or number < 0:
            raise RolloutFailed("the record is not of the taskset; set data.task.name=verifiers")
        self._tasks += itertools.islice(self._rest, max(0, number + 1 - len(self._tasks)))
        if number >= len(self._tasks):
            raise RolloutFailed(f"the taskset has {len(self._tasks)} tasks, and none with the number {number}")
        return self._tasks[number]


def _example(number: int, data: Mapping[str, Any]) -> dict[str, Any]:
    prompt = data.get("prompt") or ""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if data.get("system_prompt"):
        messages = [{"role": "system", "content": data["system_prompt"]}, *messages]
    return {"number": number, "prompt": messages, "answer": str(data.get("answer") or "")}


def _outcome(episode: Any) -> dict[str, Any]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        said = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it is not complete"
        raise RolloutFailed(f"the rollout ended with an error: {said}")
    if len(episode.traces) != 1:
        raise RolloutFailed(f"the episode has the rewards of {len(episode.traces)} agents, and one is wanted")
    (trace,) = episode.traces
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    return {
        "reward": finite_reward(trace.reward),
        "metrics": {**rewards, **trace.metrics},
        "truncated": bool(trace.is_truncated),
        "stop_condition": trace.stop_condition,
    }

"""Environments of the library `verifiers` ≥ 0.3.1: their examples, and rollouts with an OpenAI client.

This module runs in an interpreter that has `verifiers` and may lack all other dependencies of this package. So it
imports only the standard library and, when an environment is loaded, `verifiers`. Run as a program, it writes the
examples of an environment to a file.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import import_user_code, is_import_string, load_object, run_user_code

KEY = "rollout.environment.name"
MODEL = "policy"  # the gateway takes any name
_OF_THE_LIBRARY = ("reward",)  # the library's metrics that repeat the reward
_loaded: dict[str, VerifiersEnvironment] = {}
_numbers = itertools.count()


class VerifiersEnvironment(Protocol):
    """The common interface of the library's two kinds of environments."""

    def examples(self, is_heldout: bool, limit: int | None) -> list[dict[str, object]]:
        """Return the dataset's examples as JSON values, each with `prompt`, `answer` and what `rollout` needs.

        Args:
            is_heldout: Whether to return the evaluation dataset's examples (none if there is no such dataset).
            limit: The maximum number of examples; None for all.
        """
        ...

    async def rollout(self, example: Mapping[str, object], base_url: str, api_key: str) -> dict[str, Any]:
        """Let the policy answer an example; return `reward`, `metrics`, `truncated` and `stop_condition`.

        Args:
            example: One of `examples`, or a mapping with `prompt`, `answer` and `info`.
            base_url: The address for an OpenAI client.
            api_key: The API key for the client.

        Raises:
            RolloutFailed: The rollout failed.
        """
        ...


def load(name: str, kwargs: Mapping[str, object]) -> VerifiersEnvironment:
    """Return an environment, which is loaded once per process.

    Args:
        name: The name of an installed environment, as `verifiers` takes it, or an import string of a function that
            returns one, such as `file.py:load_environment`.
        kwargs: The arguments of the function, or the keys of the environment's configuration.
    """
    key = json.dumps([name, dict(kwargs)], sort_keys=True)
    if key not in _loaded:
        if importlib.util.find_spec("verifiers") is None:
            raise ConfigError(
                f"{KEY}={name} needs the Python package verifiers, which {sys.executable} does not have; pip install "
                "'rl_megatron[verifiers]', or name the interpreter of an environment that has it in "
                "rollout.environment.python"
            )
        _loaded[key] = _adapt(_build(name, kwargs), name)
    return _loaded[key]


def _build(name: str, kwargs: Mapping[str, object]) -> Any:
    if is_import_string(name):
        function = load_object(name, KEY)
        return run_user_code(f"{KEY}={name}", lambda: function(**kwargs))
    module = _import_module(name)
    if hasattr(module, "load_environment"):
        return run_user_code(f"{KEY}={name}", lambda: module.load_environment(**kwargs))
    return run_user_code(f"{KEY}={name}", lambda: _build_from_taskset(name, kwargs))


def _import_module(name: str) -> ModuleType:
    """Import the module that is named by the last part of an environment's name, as `verifiers` does."""
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    taskset = f"verifiers.v1.tasksets.{module}"
    try:
        if importlib.util.find_spec(taskset) is not None:
            return importlib.import_module(taskset)
    except ModuleNotFoundError:  # the library has no such package
        pass
    missing = f"install its package for {sys.executable}, or name a function as in file.py:load_environment"
    return import_user_code(f"{KEY}={name}", module, lambda: importlib.import_module(module), missing)


def _adapt(environment: Any, name: str) -> VerifiersEnvironment:
    if callable(getattr(environment, "run_rollout", None)):
        return ClassicEnvironment(environment, name)
    if callable(getattr(environment, "run_episode", None)):
        return TasksetEnvironment(environment, name)
    raise ConfigError(f"{KEY}={name} made a {type(environment).__name__}, which is not an environment of verifiers")


class RolloutFailed(RuntimeError):
    """The error of a rollout that ended with an error, or with a reward that is not a finite number."""


class ClassicEnvironment:
    """An environment that has the method `run_rollout`, as in `verifiers` 0.3.1."""

    def __init__(self, environment: Any, name: str):
        """Keep the environment, whose rewards must not compare the rollouts of a group."""
        if getattr(environment, "requires_group_rollouts", False):
            raise ConfigError(
                f"rollout.environment.name={name} scores whole groups of rollouts, but each rollout is scored alone "
                "here; use reward functions that score a single rollout"
            )
        # These imports take seconds, which must not count in the time limit of a rollout.
        from verifiers.clients import OpenAIChatCompletionsClient  # pyright: ignore[reportMissingImports]

        self._environment, self._client_class = environment, OpenAIChatCompletionsClient
        self._openai = _shared_client()

    def examples(self, is_heldout: bool, limit: int | None) -> list[dict[str, object]]:
        """Return the examples of the environment's dataset, or of its dataset for evaluation."""
        environment = self._environment
        source, dataset = ("eval_dataset_source", "eval_dataset") if is_heldout else ("dataset_source", "dataset")
        if getattr(environment, source, None) is None and getattr(environment, dataset, None) is None:
            return []
        read = environment.get_eval_dataset if is_heldout else environment.get_dataset
        return [_drop_empty_fields(example) for example in itertools.islice(read(), limit)]

    async def rollout(self, example: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Run one rollout, and return its results; raise RolloutFailed if it has an error or no finite reward."""
        client = self._client_class(self._openai.with_options(base_url=base_url, api_key=api_key))
        output = await self._environment.run_rollout(dict(example), client, MODEL, {})
        if output.get("error"):
            raise RolloutFailed(f"the rollout ended with an error: {_describe_error(output['error'])}")
        metrics = {name: value for name, value in (output.get("metrics") or {}).items() if name not in _OF_THE_LIBRARY}
        return {
            "reward": _check_reward(output.get("reward")),
            "metrics": metrics,
            "truncated": bool(output.get("is_truncated")),
            "stop_condition": output.get("stop_condition"),
        }


def _shared_client() -> Any:
    """Return an OpenAI client, whose connections all rollouts of this process share.

    Connections are unlimited: the gateway waits for all requests of a round, so none may wait for a free connection.
    """
    import openai

    limits = type(openai.DEFAULT_CONNECTION_LIMITS)(max_connections=None, max_keepalive_connections=100)
    http = openai.DefaultAsyncHttpxClient(limits=limits, timeout=None)
    return openai.AsyncOpenAI(
        base_url="http://127.0.0.1", api_key="none", max_retries=0, timeout=None, http_client=http
    )


def _check_reward(reward: object) -> float:
    """Return a reward as a float, or raise RolloutFailed if it is not a finite number."""
    if isinstance(reward, bool) or not isinstance(reward, Real) or not math.isfinite(reward):
        raise RolloutFailed(f"the environment gave the reward {reward!r:.80}; a reward is a finite number")
    return float(reward)


def _drop_empty_fields(example: Mapping[str, object]) -> dict[str, object]:
    """Return an example without its None fields: a table gives every example all fields."""
    return json.loads(json.dumps({name: value for name, value in example.items() if value is not None}, default=str))


def _describe_error(error: object) -> str:
    if isinstance(error, Mapping):
        return str(error.get("error_chain_str") or error.get("error_chain_repr") or error.get("error") or dict(error))
    return str(error)


def _build_from_taskset(name: str, kwargs: Mapping[str, Any]) -> object:
    """Return an installed taskset's environment; `kwargs` has keys of its configuration, such as `agent`."""
    import verifiers.v1 as library  # pyright: ignore[reportMissingImports]

    taskset = {**(kwargs.get("taskset") or {}), "id": name}
    return library.load_environment(library.resolve_env_config({**kwargs, "taskset": taskset}))


class TasksetEnvironment:
    """An environment with the method `run_episode`. Each rollout starts its own servers, for its own API key."""

    def __init__(self, environment: Any, name: str):
        """Keep the environment, whose configuration each rollout uses."""
        self._environment, self._name = environment, name
        self._tasks: list[object] = []
        self._rest = iter(environment.taskset)

    def examples(self, is_heldout: bool, limit: int | None) -> list[dict[str, object]]:
        """Return the tasks of the taskset, each with its number. A taskset has none for evaluation."""
        if is_heldout:
            return []
        taskset = self._environment.taskset
        is_bounded = getattr(taskset, "bounded", not taskset.INFINITE)  # tasksets of 0.3.1 have no attribute `bounded`
        if limit is None and not is_bounded:
            raise ConfigError(
                f"rollout.environment.name={self._name} has tasks without an end; set data.task.max_examples"
            )
        tasks = enumerate(itertools.islice(taskset, limit))
        return [_build_example(number, task.data.model_dump(mode="json")) for number, task in tasks]

    async def rollout(self, example: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Run an episode, and return its results; raise RolloutFailed unless it has one agent and a finite reward."""
        import verifiers.v1 as library  # pyright: ignore[reportMissingImports]

        task = self._find_task(example)
        environment = type(self._environment)(self._environment.config)
        variable = f"RL_MEGATRON_SESSION_{next(_numbers)}"  # the library reads keys from environment variables only
        os.environ[variable] = api_key
        try:
            client = library.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = library.ModelContext(model=MODEL, client=client)
            async with environment.serving():
                episode = await environment.run_episode(task, context)
        finally:
            del os.environ[variable]
        return _read_episode(episode)

    def _find_task(self, example: Mapping[str, object]) -> object:
        """Return the task of an example, which must be from the taskset."""
        number = example.get("number")
        if not isinstance(number, int) or number < 0:
            raise RolloutFailed("the record is not an example of the taskset; set data.task.name=verifiers")
        self._tasks += itertools.islice(self._rest, max(0, number + 1 - len(self._tasks)))
        if number >= len(self._tasks):
            raise RolloutFailed(f"the taskset has {len(self._tasks)} tasks, and none with the number {number}")
        return self._tasks[number]


def _build_example(number: int, data: Mapping[str, Any]) -> dict[str, object]:
    prompt = data.get("prompt") or ""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if data.get("system_prompt"):
        messages = [{"role": "system", "content": data["system_prompt"]}, *messages]
    return {"number": number, "prompt": messages, "answer": str(data.get("answer") or "")}


def _read_episode(episode: Any) -> dict[str, object]:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.ok:
        message = "; ".join(f"{error.type}: {error.message}" for error in errors) or "it is not complete"
        raise RolloutFailed(f"the rollout ended with an error: {message}")
    if len(episode.traces) != 1:
        raise RolloutFailed(
            f"the episode has the rewards of {len(episode.traces)} agents, but only one agent is supported"
        )
    (trace,) = episode.traces
    rewards = {name: reward.score for name, reward in trace.rewards.items()}
    return {
        "reward": _check_reward(trace.reward),
        "metrics": {**rewards, **trace.metrics},
        "truncated": bool(trace.is_truncated),
        "stop_condition": trace.stop_condition,
    }


def main(arguments: list[str]) -> None:
    """Write an environment's examples to a JSON file, under `train` and `heldout`, or a message under `error`.

    Args:
        arguments: The file, and a JSON object with `name`, `kwargs`, `limit` and `paths`, which are directories to
            import modules from.
    """
    file, request = Path(arguments[0]), json.loads(arguments[1])
    sys.path += [path for path in request["paths"] if path not in sys.path]
    try:
        environment = load(request["name"], request["kwargs"])
        result = {
            name: environment.examples(is_heldout, request["limit"])
            for name, is_heldout in (("train", False), ("heldout", True))
        }
    except ConfigError as error:
        result = {"error": str(error)}
    file.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

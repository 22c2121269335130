"""Load an environment of `verifiers`, by the name of its package or by the import string of a function."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Protocol

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import imported, is_import_string, load_object, user_code

KEY = "rollout.environment.name"
_loaded: dict[str, VerifiersEnvironment] = {}


class VerifiersEnvironment(Protocol):
    """An environment of either of the library's interfaces."""

    def examples(self, is_heldout: bool, limit: int | None) -> list[dict[str, Any]]:
        """Return the examples of its dataset as JSON takes them, each with `prompt`, `answer` and what `rollout` needs.

        Args:
            is_heldout: Whether to return those of its dataset for evaluation. Without one, there are none.
            limit: The most examples; None for all.
        """
        ...

    async def rollout(self, example: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Let the policy answer an example; return `reward`, `metrics`, `truncated` and `stop_condition`.

        Args:
            example: One of `examples`, or a mapping with `prompt`, `answer` and `info`.
            base_url: The address for an OpenAI client.
            api_key: Its key.

        Raises:
            BadAnswer: The rollout failed.
        """
        ...


def load(name: str, kwargs: Mapping[str, Any]) -> VerifiersEnvironment:
    """Return an environment. This process loads each of them once.

    Args:
        name: The name of an installed environment, as `verifiers` takes it, or an import string of a function that
            returns one, such as `file.py:load_environment`.
        kwargs: The arguments of the function, or the keys of the environment's configuration.

    Raises:
        ConfigError: The library is not installed, or the environment cannot be loaded.
    """
    where = json.dumps([name, dict(kwargs)], sort_keys=True)
    if where not in _loaded:
        if importlib.util.find_spec("verifiers") is None:
            raise ConfigError(
                f"{KEY}={name} needs the Python package verifiers, which {sys.executable} does not have; pip install "
                "'rl_megatron[verifiers]', or name the interpreter of an environment that has it in "
                "rollout.environment.python"
            )
        _loaded[where] = _adapted(_made(name, kwargs), name)
    return _loaded[where]


def _made(name: str, kwargs: Mapping[str, Any]) -> Any:
    if is_import_string(name):
        found = load_object(name, KEY)
        return user_code(f"{KEY}={name}", lambda: found(**kwargs))
    module = _module_of(name)
    if hasattr(module, "load_environment"):
        return user_code(f"{KEY}={name}", lambda: module.load_environment(**kwargs))
    try:
        from rl_megatron.data.verifiers.tasksets import made_of_a_taskset
    except ImportError as error:
        raise ConfigError(
            f"{KEY}={name}: the module {module.__name__} has no load_environment, and verifiers "
            f"{importlib.metadata.version('verifiers')} has no tasksets: {error}"
        ) from error
    return user_code(f"{KEY}={name}", lambda: made_of_a_taskset(name, kwargs))


def _module_of(name: str) -> ModuleType:
    """Return the module of an environment, which `verifiers` finds by the last part of its name.

    Raises:
        ConfigError: There is none, or it cannot be imported.
    """
    module = name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    own = f"verifiers.v1.tasksets.{module}"
    try:
        if importlib.util.find_spec(own) is not None:
            return importlib.import_module(own)
    except ModuleNotFoundError:  # a version without such a package
        pass
    missing = f"install its package for {sys.executable}, or name a function as in file.py:load_environment"
    return imported(f"{KEY}={name}", module, lambda: importlib.import_module(module), missing)


def _adapted(made: Any, name: str) -> VerifiersEnvironment:
    if callable(getattr(made, "run_rollout", None)):
        from rl_megatron.data.verifiers.classic import ClassicEnvironment

        return ClassicEnvironment(made, name)
    if callable(getattr(made, "run_episode", None)):
        from rl_megatron.data.verifiers.tasksets import TasksetEnvironment

        return TasksetEnvironment(made, name)
    raise ConfigError(f"{KEY}={name} made a {type(made).__name__}, which is not an environment of verifiers")

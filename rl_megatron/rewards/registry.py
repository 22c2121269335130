"""The registry of reward functions, which `reward.functions[].name` selects from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rl_megatron.config.loading.registry import Registry

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

REWARDS: Registry[Callable[..., Any]] = Registry("reward function")


def register_reward(name: str) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that registers a function, or a class with callable instances, as reward function `name`.

    `docs/rewards.md` describes the forms that a function may have. A class is instantiated once in each worker process,
    with the `kwargs` of the configuration.

    Raises:
        ValueError: Another reward function has this name already.
    """

    def add(function: FunctionT) -> FunctionT:
        REWARDS.register(name)(function)
        return function

    return add

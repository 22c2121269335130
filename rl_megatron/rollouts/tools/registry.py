"""The tools that `rollout.tools.functions` selects by name: those of the package, and those of plugins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rl_megatron.config.loading.registry import Registry

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True)
class RegisteredTool:
    """A registered function.

    Attributes:
        settings: The keys of `rollout.tools` that it takes as arguments, which the model does not see.
    """

    function: Callable[..., Any]
    settings: tuple[str, ...] = ()


TOOLS: Registry[RegisteredTool] = Registry("tool")


def register_tool(name: str, settings: tuple[str, ...] = ()) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that registers a function as the tool `name` of `rollout.tools.functions`.

    The function must be in a module that other processes can import, because it runs in another process.

    Args:
        name: The name in the configuration. The model sees the function's own name instead.
        settings: Keys of `rollout.tools` that the function takes as arguments, which the model does not see.

    Raises:
        ValueError: Another tool has this name already.
    """

    def add(function: FunctionT) -> FunctionT:
        if name in TOOLS and TOOLS[name].function.__module__ == function.__module__:
            TOOLS[name] = RegisteredTool(function, settings)  # the module was imported twice
        else:
            TOOLS.register(name)(RegisteredTool(function, settings))
        return function

    return add

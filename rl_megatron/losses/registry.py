"""The registry of losses. Every registered loss is tested by tests/contract/ and can be selected as `loss.name`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import LOSSES
from rl_megatron.losses.contract import is_loss_function

LossClass = TypeVar("LossClass", bound=type)

__all__ = ["LOSSES", "build_loss", "configured_loss", "register_loss"]


def register_loss(name: str) -> Callable[[LossClass], LossClass]:
    """Return a class decorator that registers a loss as `name`. The class takes its settings as its only argument.

    Raises:
        ValueError: Another loss already has this name.
    """
    return LOSSES.register(name)


def build_loss(name: str, cfg: Any = None) -> Any:
    """Return the loss `name` with the settings `cfg`, or with its defaults if `cfg` is None.

    Args:
        name: A registered name, or the import string of a user's loss: a class that takes its settings as its only
            argument, or a function that is itself the loss and has a parameter `next_token_logprobs`.
        cfg: The settings.

    Raises:
        UnknownName: No loss has this name. The message suggests the nearest name.
        ConfigError: The import string cannot be loaded or names no loss, or settings are given to a function.
        Exception: The loss refuses its settings.
    """
    registered = LOSSES.find(name, "loss.name")
    is_loss = not isinstance(registered, type) and is_loss_function(registered)
    if inspect.isfunction(registered) and not is_loss:
        raise ConfigError(
            f"loss.name={name}: {registered.__name__} has no parameter next_token_logprobs, which a function "
            "needs to be a loss; add it, or name a class"
        )
    if not is_loss and inspect.signature(registered).parameters:
        return registered(cfg)
    if cfg:
        raise ConfigError(f"loss.{next(iter(cfg))} has no effect: loss.name={name} takes no settings; leave it out")
    return registered if is_loss else registered()


def configured_loss(section: Mapping[str, Any]) -> Any:
    """Build the loss of a configuration's section {name, **settings}. For errors, see `build_loss`."""
    return build_loss(section["name"], {key: value for key, value in section.items() if key != "name"})

"""The registry of losses. Every registered loss is tested by tests/contract/ and can be selected as `loss.name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rl_megatron.config.registry import Registry

LossClass = TypeVar("LossClass", bound=type)

LOSSES: Registry[Any] = Registry("loss")


def register_loss(name: str) -> Callable[[LossClass], LossClass]:
    """Return a class decorator that registers a loss as `name`. The class takes its settings as its only argument.

    Raises:
        ValueError: Another loss already has this name.
    """
    return LOSSES.register(name)


def build_loss(name: str, cfg: Any = None) -> Any:
    """Return the loss `name` with the settings `cfg`, or with its defaults if `cfg` is None.

    Raises:
        UnknownName: No loss has this name. The message suggests the nearest name.
        Exception: Whatever the loss raises about its settings.
    """
    return LOSSES[name](cfg)


def configured_loss(section: Mapping[str, Any]) -> Any:
    """Return the loss of a configuration's section {name, **settings}.

    Raises:
        Exception: See `build_loss`.
    """
    return build_loss(section["name"], {key: value for key, value in section.items() if key != "name"})

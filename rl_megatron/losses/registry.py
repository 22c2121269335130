"""The losses by name. A registered loss is certified by tests/contract/, and configurable as `loss.name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rl_megatron.config.registry import Registry

LossClass = TypeVar("LossClass", bound=type)

LOSSES: Registry[Any] = Registry("loss")


def register_loss(name: str) -> Callable[[LossClass], LossClass]:
    """Return a class decorator that registers a loss as `name`. The class takes its settings as its one argument.

    Raises:
        ValueError: another loss has this name.
    """
    return LOSSES.register(name)


def build_loss(name: str, cfg: Any = None) -> Any:
    """Return the loss `name` with settings `cfg` (None: its defaults).

    Raises:
        UnknownName: there is no such loss; names the nearest one.
        Exception: what the loss raises about its settings.
    """
    return LOSSES[name](cfg)


def configured_loss(section: Mapping[str, Any]) -> Any:
    """Return the loss of a configuration's section {name, **settings}. It raises what `build_loss` raises."""
    return build_loss(section["name"], {key: value for key, value in section.items() if key != "name"})

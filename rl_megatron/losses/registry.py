"""The losses by name. A registered loss is certified by tests/contract/, and configurable as `loss.name`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rl_megatron.config.errors import nearest

LOSSES: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: `LOSSES[name] = cls`. The class takes its settings as the one constructor argument."""

    def add(cls: type) -> type:
        if name in LOSSES:
            raise ValueError(f"loss {name!r} is already registered as {LOSSES[name].__name__}")
        LOSSES[name] = cls
        return cls

    return add


def build_loss(name: str, cfg: Any = None) -> Any:
    """The loss `name` with settings `cfg` (None: defaults).

    Raises: ValueError for an unknown name, naming the nearest; what the loss raises about its settings.
    """
    if name not in LOSSES:
        raise ValueError(f"there is no loss {name!r}{nearest(name, LOSSES)}")
    return LOSSES[name](cfg)


def configured_loss(section: Mapping[str, Any]) -> Any:
    """The loss of a configuration's section {name, **settings}. Raises: as `build_loss`."""
    return build_loss(section["name"], {key: value for key, value in section.items() if key != "name"})

"""Strict settings: a frozen dataclass from a dict, a dataclass or an OmegaConf node; nothing misspelt passes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rl_megatron.config.errors import nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")


def parse_settings(cls: type[Settings], cfg: Any) -> Settings:
    """`cls` filled from `cfg`; missing keys take their defaults, None takes all of them.

    Raises: KeyError for a key `cls` does not have, naming the nearest one; TypeError if cfg is not a mapping; whatever
        `cls` itself raises about values.
    """
    if cfg is None:
        return cls()
    if isinstance(cfg, cls):
        return cfg
    if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type):
        cfg = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    if not isinstance(cfg, Mapping):  # an OmegaConf node is one
        raise TypeError(f"{cls.__name__} takes a mapping or a dataclass, got {type(cfg).__name__}")
    known = [field.name for field in dataclasses.fields(cls)]
    for key in cfg:
        if key not in known:
            raise KeyError(f"{cls.__name__} has no key {key!r}{nearest(str(key), known)}")
    return cls(**{key: cfg[key] for key in cfg})


def check_types(settings: Any) -> None:
    """Every field declared bool holds a bool, and every number is a finite number.

    Raises: TypeError or ValueError naming key and value. `True` is not a number here: it is a misplaced switch.
    """
    for field in dataclasses.fields(settings):
        value, declared = getattr(settings, field.name), str(field.type)
        where = f"{type(settings).__name__}.{field.name}={value!r}"
        if declared == "bool" and not isinstance(value, bool):
            raise TypeError(f"{where} must be true or false")
        if "float" in declared and not ("None" in declared and value is None):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{where} must be a number{' or null' if 'None' in declared else ''}")
            if not math.isfinite(value):
                raise ValueError(f"{where} must be finite")


def check_ranges(settings: Any, at_least_zero: Iterable[str] = (), above_zero: Iterable[str] = ()) -> None:
    """Raises: ValueError naming key, value and rule for a number out of its range; None is in every range."""
    optional = {field.name for field in dataclasses.fields(settings) if "None" in str(field.type)}
    for key in at_least_zero:
        if getattr(settings, key) is not None and getattr(settings, key) < 0:
            raise ValueError(f"{key}={getattr(settings, key)} must not be negative")
    for key in above_zero:
        if getattr(settings, key) is not None and getattr(settings, key) <= 0:
            remedy = " (null switches it off)" if key in optional else ""
            raise ValueError(f"{key}={getattr(settings, key)} must be positive{remedy}")

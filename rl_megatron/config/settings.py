"""Strict settings: build a frozen dataclass from a dict, a dataclass or an OmegaConf node, and refuse unknown keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rl_megatron.config.errors import nearest
from rl_megatron.config.registry import Registry

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Settings = TypeVar("Settings", bound="DataclassInstance")
SettingsClass = TypeVar("SettingsClass", bound=type)

LOSSES: Registry[Any] = Registry("loss")  # the registered losses; those of the package join when it is imported
LOSS_SETTINGS: Registry[type[Any]] = Registry("loss")  # the settings class of each loss of the package


def register_loss_settings(name: str) -> Callable[[SettingsClass], SettingsClass]:
    """Return a class decorator that registers the settings of the loss `name`."""

    def add(cls: SettingsClass) -> SettingsClass:
        LOSS_SETTINGS.register(name)(cls)
        return cls

    return add


def parse_settings(cls: type[Settings], cfg: Any) -> Settings:
    """Return a `cls` with the values of `cfg`. Missing keys take their defaults, and so do all keys if `cfg` is None.

    Raises:
        KeyError: `cls` does not have one of the keys. The message suggests the nearest key.
        TypeError: `cfg` is neither a mapping nor a dataclass.
        Exception: Whatever `cls` itself raises about values.
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
    """Check that every field declared bool holds a bool, and that every number is finite.

    `True` is not accepted as a number, because it is usually the value of another key.

    Raises:
        TypeError: A value has the wrong type. The message names the key and the value.
        ValueError: A number is infinite or NaN. The message names the key and the value.
    """
    for field in dataclasses.fields(settings):
        value, declared = getattr(settings, field.name), str(field.type)
        setting = f"{type(settings).__name__}.{field.name}={value!r}"
        if declared == "bool" and not isinstance(value, bool):
            raise TypeError(f"{setting} must be true or false")
        if "float" in declared and not ("None" in declared and value is None):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{setting} must be a number{' or null' if 'None' in declared else ''}")
            if not math.isfinite(value):
                raise ValueError(f"{setting} must be finite")


def check_ranges(settings: Any, at_least_zero: Iterable[str] = (), above_zero: Iterable[str] = ()) -> None:
    """Check the ranges of numbers. None is in every range.

    Args:
        settings: A dataclass.
        at_least_zero: The keys whose values must not be negative.
        above_zero: The keys whose values must be positive.

    Raises:
        ValueError: A number is out of its range. The message names the key, the value and the rule.
    """
    optional = {field.name for field in dataclasses.fields(settings) if "None" in str(field.type)}
    for key in at_least_zero:
        if getattr(settings, key) is not None and getattr(settings, key) < 0:
            raise ValueError(f"{key}={getattr(settings, key)} must not be negative")
    for key in above_zero:
        if getattr(settings, key) is not None and getattr(settings, key) <= 0:
            remedy = " (null disables it)" if key in optional else ""
            raise ValueError(f"{key}={getattr(settings, key)} must be positive{remedy}")

"""Strict settings: build frozen dataclasses from plain mappings, and refuse unknown keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import InitErrorDetails, PydanticCustomError

from rl_megatron.config.errors import nearest
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.recipes import suggest_method

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_STRICT = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)
Section = TypeVar("Section")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def section(cls: type[Section]) -> type[Section]:
    """Return `cls` as a section of the configuration: a frozen dataclass, whose values pydantic checks."""
    return dataclass(frozen=True, config=_STRICT, kw_only=True)(cls)  # pyright: ignore[reportReturnType]  # it is cls


def _no_switch(value: object) -> object:
    """Return `value`, but refuse a bool, which Python would accept as the number 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Number = BeforeValidator(_no_switch)
Positive = Annotated[int, Field(ge=1), Number]
NonNegative = Annotated[int, Field(ge=0), Number]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0), Number]
ClosedFraction = Annotated[float, Field(ge=0.0, le=1.0), Number]
PositiveFloat = Annotated[float, Field(gt=0.0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0.0), Number]


Settings = TypeVar("Settings", bound="DataclassInstance")
SettingsClass = TypeVar("SettingsClass", bound=type)

LOSSES: Registry[Any] = Registry("loss")  # the registered losses; importing rl_megatron.losses adds the package's
LOSS_SETTINGS: Registry[type[Any]] = Registry("loss")  # the settings class of each loss of the package


def register_loss_settings(name: str) -> Callable[[SettingsClass], SettingsClass]:
    """Return a class decorator that registers the settings of the loss `name`."""

    def add(cls: SettingsClass) -> SettingsClass:
        LOSS_SETTINGS.register(name)(cls)
        return cls

    return add


def parse_settings(cls: type[Settings], cfg: object) -> Settings:
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
    if not isinstance(cfg, Mapping):  # an OmegaConf mapping is a Mapping, too
        raise TypeError(f"{cls.__name__} takes a mapping or a dataclass, got {type(cfg).__name__}")
    names = [field.name for field in dataclasses.fields(cls)]
    for key in cfg:
        if key not in names:
            raise KeyError(f"{cls.__name__} has no key {key!r}{nearest(str(key), names)}")
    return cls(**{key: cfg[key] for key in cfg})


def check_types(settings: DataclassInstance) -> None:
    """Check that every field declared bool holds a bool (TypeError), and that every number is finite (ValueError).

    `True` is not accepted as a number, because it was usually meant for another key.
    """
    for key in dataclasses.fields(settings):
        value, declared = getattr(settings, key.name), str(key.type)
        setting = f"{type(settings).__name__}.{key.name}={value!r}"
        if declared == "bool" and not isinstance(value, bool):
            raise TypeError(f"{setting} must be true or false")
        if "float" in declared and not ("None" in declared and value is None):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{setting} must be a number{' or null' if 'None' in declared else ''}")
            if not math.isfinite(value):
                raise ValueError(f"{setting} must be finite")


def check_ranges(
    settings: DataclassInstance, at_least_zero: Iterable[str] = (), above_zero: Iterable[str] = ()
) -> None:
    """Check the fields that must be at least 0 and those that must be above 0. None is accepted.

    Raises:
        ValueError: A field is out of its range.
    """
    optional = {field.name for field in dataclasses.fields(settings) if "None" in str(field.type)}
    for key in at_least_zero:
        if getattr(settings, key) is not None and getattr(settings, key) < 0:
            raise ValueError(f"{key}={getattr(settings, key)} must not be negative")
    for key in above_zero:
        if getattr(settings, key) is not None and getattr(settings, key) <= 0:
            remedy = " (null disables it)" if key in optional else ""
            raise ValueError(f"{key}={getattr(settings, key)} must be positive{remedy}")


ClassT = TypeVar("ClassT", bound=type)


def choose_class(key: str, registry: Registry[Any]) -> BeforeValidator:
    """Return a validator that turns a mapping into the registered dataclass that its `key` names."""

    def build(value: object) -> object:
        if not isinstance(value, Mapping):
            return value  # pydantic accepts an instance of the dataclass and refuses everything else
        if key not in value:
            raise _error(key, "must be set" + nearest("", registry), None)
        name = value[key]
        if not isinstance(name, str) or name not in registry:
            suggest = suggest_method if registry.kind == "algorithm" else nearest
            reason = f"there is no {registry.kind} {name!r}{suggest(str(name), registry)}"
            raise _error(key, reason, name)
        return _adapter(registry[name]).validate_python(value)

    return BeforeValidator(build)


def register_class(key: str, registry: Registry[Any], declared: str) -> Callable[[ClassT], ClassT]:
    """Return a class decorator that registers a section's dataclass under the default of its field `key`.

    The class must be declared with @section and set the class variable `declared`.
    """

    def add(cls: ClassT) -> ClassT:
        settings = cls.__dict__.get("__pydantic_config__")
        if settings is None or settings.get("extra") != "forbid":
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__} must be declared with @section of rl_megatron, "
                "which refuses unknown keys"
            )
        name = getattr(cls, key, None)
        if not isinstance(name, str):
            where = f"{cls.__module__}.{cls.__qualname__}.{key}"
            raise TypeError(f'{where} needs a default, the name to register, as in {key}: Literal["mine"] = "mine"')
        if not hasattr(cls, declared):
            raise TypeError(f"{cls.__module__}.{cls.__qualname__} must declare the class variable {declared}")
        return registry.register(name)(cls)

    return add


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _error(key: str, reason: str, value: object) -> ValidationError:
    error = PydanticCustomError("unknown_name", "{reason}", {"reason": reason})
    return ValidationError.from_exception_data("section", [InitErrorDetails(type=error, loc=(key,), input=value)])

"""Sections whose keys depend on a name in them: the name chooses a registered dataclass, which checks the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from rl_megatron.config.errors import nearest
from rl_megatron.config.registry import Registry

ClassT = TypeVar("ClassT", bound=type)


def named_class(key: str, registry: Registry[Any]) -> BeforeValidator:
    """Return a validator that turns a mapping into the registered dataclass that its `key` names."""

    def build(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value  # pydantic accepts an instance of the dataclass and refuses everything else
        if key not in value:
            raise _error(key, "must be set" + nearest("", registry), None)
        name = value[key]
        if not isinstance(name, str) or name not in registry:
            reason = f"there is no {registry.kind} {name!r}{nearest(str(name), registry)}"
            raise _error(key, reason, name)
        return _adapter(registry[name]).validate_python(value)

    return BeforeValidator(build)


def register_class(key: str, registry: Registry[Any], declared: str) -> Callable[[ClassT], ClassT]:
    """Return a class decorator that registers a section's dataclass under the default of its field `key`.

    Args:
        key: The field whose default is the name.
        registry: The registry that the class is added to.
        declared: A class variable that every such class must set.

    Raises:
        TypeError: The decorated class is not declared with @section, or has no name, or does not set `declared`.
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


def _error(key: str, reason: str, value: Any) -> ValidationError:
    error = PydanticCustomError("unknown_name", "{reason}", {"reason": reason})
    return ValidationError.from_exception_data("section", [InitErrorDetails(type=error, loc=(key,), input=value)])

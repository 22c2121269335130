"""Build the dataclasses of sections from plain mappings; errors name the keys of wrong values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from rl_megatron.config import algorithms, data_sources  # noqa: F401  # they register their classes
from rl_megatron.config.errors import ConfigError, shorten_value
from rl_megatron.config.loading.hints import schema_paths, suggest_key
from rl_megatron.config.schema import ALGORITHM_CONFIGS, SOURCE_CONFIGS

# Sections whose dataclass is chosen by one of their keys.
_CHOOSING_KEYS = {
    "algorithm": ("name", ALGORITHM_CONFIGS),
    "data": ("source", SOURCE_CONFIGS),
}
SectionT = TypeVar("SectionT")
_MOST = 8  # wrong keys that one message names


def find_chosen_class(section: str, values: object) -> type | None:
    """Return the dataclass registered under the section's name or source, or None if there is none."""
    if section not in _CHOOSING_KEYS or not isinstance(values, Mapping):
        return None
    key, registry = _CHOOSING_KEYS[section]
    name = values.get(key)
    return registry[name] if isinstance(name, str) and name in registry else None


def build_section(section: type[SectionT], values: Mapping[str, object], where: str) -> SectionT:
    """Return an instance of the dataclass `section`, built from plain mappings and lists.

    `where` is the beginning of the key path, such as "stages.sft.". The error names the wrong keys, at most eight.
    """
    try:
        return TypeAdapter(section).validate_python(values)
    except ValidationError as error:
        described = [_describe(detail, section, values, where) for detail in error.errors()[:_MOST]]
        more = error.error_count() - len(described)
        raise ConfigError("; ".join(described) + (f"; and {more} more mistakes" if more else "")) from error


def refuse_unknown(tree: Mapping[str, object], choices: Iterable[str], where: str) -> None:
    """Refuse keys of a mapping that are not among `choices`; the message names the nearest choice."""
    choices = set(choices)
    for key in tree:
        if key not in choices:
            raise ConfigError(f"unknown key {f'{where}{key}'!r}{suggest_key(str(key), choices)}")


def refuse_missing(tree: Mapping[str, object], needed: Iterable[str]) -> None:
    """Refuse a configuration that lacks any of the `needed` keys."""
    missing = sorted(set(needed) - tree.keys())
    if missing:
        raise ConfigError(f"the configuration has no {missing[0]!r}: an override or an experiment deleted it; keep it")


def check_mapping(value: object, where: str) -> Mapping[str, object]:
    """Return `value`, or an empty mapping for null; refuse other values of the key `where`."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{where}={shorten_value(value)}: must be a mapping of keys to values")
    return value or {}


def _describe(detail: Mapping[str, Any], section: type, values: Mapping[str, Any], where: str) -> str:
    location = _with_elements(detail["loc"])
    if location[:2] == ["model", "rope_scaling"] and len(location) > 3:
        location.pop(2)  # pydantic adds the name of the union's member, which the key path does not have
    path = ".".join(location)
    if detail["type"] == "unexpected_keyword_argument":
        chosen = find_chosen_class(location[0], values.get(location[0]))
        keys = set(schema_paths(section, elements=True))
        if chosen is not None:
            others = {key for key in keys if key.partition(".")[0] != location[0]}
            keys = others | set(schema_paths(chosen, f"{location[0]}.", elements=True))
        owners = "" if chosen is None or ".".join(location[:2]) in keys else _list_owners(*location[:2])
        return f"unknown key {where + path!r}" + (f"; only {owners} has it" if owners else suggest_key(path, keys))
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "string_type" and isinstance(detail["input"], Mapping | list):
        message += f"; quote a text with braces or brackets for Hydra and for the shell, as in '{path}=\"{{x}}\"'"
    if detail["input"] is None and detail["type"] in ("dict_type", "dataclass_type"):
        message += "; leave it out for the default" + ("" if where else f", or delete a value: '~{path}'")
    # For a missing key, pydantic's input is the mapping that lacks it.
    value = "" if detail["type"] == "missing" else f"={shorten_value(detail['input'])}"
    return f"{where}{path}{value}: {message[0].lower()}{message[1:]}"


def _with_elements(location: Iterable[str | int]) -> list[str]:
    """Return the parts of a key path, with the index of a list's element appended to the list's key."""
    parts: list[str] = []
    for part in location:
        if isinstance(part, int) and parts:
            parts[-1] += f"[{part}]"
        else:
            parts.append(str(part))
    return parts


def _list_owners(section: str, key: str = "") -> str:
    """Return the choices of a section whose classes have the key, such as "algorithm=grpo or ppo"."""
    if section not in _CHOOSING_KEYS:
        return ""
    name, registry = _CHOOSING_KEYS[section]
    owners = [choice for choice, cls in registry.items() if key in {field.name for field in fields(cls)}]
    listed = " or ".join(filter(None, (", ".join(owners[:-1]), *owners[-1:])))
    return f"{section if name == 'name' else f'{section}.{name}'}={listed}" if owners else ""

"""Say which key or which quoting a user meant, for keys and overrides that are refused."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hydra.errors import OverrideParseException

from rl_megatron.config import schema
from rl_megatron.config.commands import override as quoted

OPEN_SECTIONS = ("stages.", "algorithm.", "data.")  # the keys of these depend on a name in the section
_MOST = 2  # keys that one hint names


def nearest_key(key: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown key: the keys that were probably meant.

    These are a key of another section with the same name, and a similar key of the same section. If there is neither,
    it is a similar path, or the list of the section's keys.

    Args:
        key: The path of the unknown key, such as "train.lr".
        known: The paths of all keys.
    """
    known = sorted(set(known))
    section, _, name = key.rpartition(".")
    siblings = [path for path in known if path.rpartition(".")[0] == section]
    names = {path.rpartition(".")[2]: path for path in siblings}
    similar = [names[match] for match in difflib.get_close_matches(name, names, n=1, cutoff=0.65)]
    elsewhere = [path for path in known if path.rpartition(".")[2] == name]
    elsewhere.sort(key=lambda path: -difflib.SequenceMatcher(None, key, path).ratio())
    meant = [*elsewhere, *similar] or difflib.get_close_matches(key, siblings or known, n=1, cutoff=0.75)
    if meant:
        return f"; did you mean {' or '.join(map(repr, meant[:_MOST]))}?"
    if siblings and section:
        return f"; {section} has the keys {', '.join(names)}"
    return f"; known: {', '.join(path for path in known if '.' not in path) or ', '.join(known) or 'none'}"


def tree_paths(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield every key path of nested mappings: "train", "train.steps", …."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from tree_paths(value, f"{prefix}{key}.")


def schema_paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield every key path of a dataclass: "train", "train.steps", …; those of all members of a union."""
    hints = get_type_hints(section)
    for name in (field.name for field in fields(section)):
        path = f"{prefix}{name}"
        yield path
        for member in _dataclass_members(hints[name]):
            yield from schema_paths(member, f"{path}.")


def explain(error: Exception, overrides: list[str], tree: Mapping[str, Any]) -> str:
    """Return a message about an override that Hydra refuses: its quoting, its unknown key, or Hydra's own words.

    Args:
        error: Hydra's error.
        overrides: All overrides.
        tree: The configuration that the choices of presets and of the experiment alone give.
    """
    if isinstance(error, OverrideParseException):
        return _about_quoting(_as_given(str(getattr(error, "override", "")), overrides))
    several = re.match(r"Ambiguous value for argument '(.*)'$", str(error), re.MULTILINE)
    if several is not None:
        return _about_several_values(_as_given(several[1], overrides))
    run_keys = {field.name for field in fields(schema.RunConfig)}
    known = {*schema_paths(schema.StageConfig), *run_keys, "experiment", *tree_paths(tree)}
    for override in overrides:
        key = key_of(override)
        if "=" not in override and not override.startswith("~"):
            return f"override {override!r} has no '='; write key=value"
        if key not in known and not key.startswith(OPEN_SECTIONS):
            return f"unknown key {key!r} in override {override!r}{nearest_key(key, known)}"
    return " ".join(str(error).partition("\nConfig search path:")[0].split())


def key_of(override: str) -> str:
    """Return the key path of an override, without the signs that add or remove it."""
    return override.split("=", 1)[0].lstrip("+~")


def _as_given(override: str, overrides: list[str]) -> str:
    """Return an override of Hydra's message as the user wrote it, without the signs that were put before it."""
    return (override if override in overrides else override.removeprefix("++")).replace("\n", "\\n")


def _about_quoting(override: str) -> str:
    key, equals, value = override.partition("=")
    if not equals:
        return f"override {override!r} has no '='; write key=value"
    argument = shlex.quote(quoted(key, value))
    return f"override {override!r}: Hydra cannot read the value; quote it for Hydra and for the shell: {argument}"


def _about_several_values(override: str) -> str:
    key, _, value = override.partition("=")
    return (
        f"override {override!r} has several values; add --multirun to run a job for each of them, write "
        f"{shlex.quote(f'{key}=[{value}]')} for a list, or {shlex.quote(quoted(key, value))} for one text with commas"
    )


def _dataclass_members(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        yield hint
    elif get_origin(hint) in (Annotated, Union, UnionType):
        for argument in get_args(hint):
            yield from _dataclass_members(argument)

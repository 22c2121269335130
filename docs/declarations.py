"""Read what is declared of a configuration key: its type, its default, and the comment that says its meaning."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
import yaml
from pydantic.fields import FieldInfo

DEFAULTS_OF_KEYS = "the defaults of its keys"
_WORDS = {int: "integer", float: "number", str: "string", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """One key of a section.

    Attributes:
        name: Its name within the section.
        type: What a value has to be, in words.
        default: The default as YAML, or None if the key has to be set.
        meaning: What stands at the declaration.
    """

    name: str
    type: str
    default: str | None
    meaning: str


def keys(section: type, without: Collection[str] = ()) -> list[Key]:
    """Return the keys of a section's dataclass, in order, those of its base classes first.

    Args:
        section: The dataclass.
        without: Names of keys to leave out, which need no meaning.

    Raises:
        ValueError: a key has no meaning; the message names all such keys.
    """
    meanings: dict[str, str] = {}
    for cls in reversed(section.__mro__):
        if dataclasses.is_dataclass(cls):
            meanings |= comments(cls)
    hints = get_type_hints(section, include_extras=True)
    fields = [field for field in dataclasses.fields(section) if field.name not in without]
    if missing := [field.name for field in fields if not meanings.get(field.name)]:
        place = f"{section.__module__}.{section.__qualname__}"
        raise ValueError(f"{place} does not say what {missing} mean: write a comment after or above each")
    return [Key(field.name, in_words(hints[field.name]), default(field), meanings[field.name]) for field in fields]


def comments(cls: type) -> dict[str, str]:
    """Return what the comments of a class say of its fields.

    A comment after a field, or the comment lines right above it, are the field's. Comment lines above several fields
    that have no comment of their own are the meaning of those that they name.
    """
    source = textwrap.dedent(inspect.getsource(cls))
    whole_lines, after_code = _comments_by_line(source)
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    above_several = ""
    for node in definition.body:
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        above = " ".join(_lines_above(node.lineno, whole_lines))
        own = after_code.get(node.end_lineno or node.lineno, "")
        above_several = above or above_several
        if above or own:
            found[node.target.id] = f"{above} {own}".strip()
        elif re.search(rf"\b{node.target.id}\b", above_several):
            found[node.target.id] = above_several
    return found


def argument_meanings(cls: type) -> dict[str, str]:
    """Return what the section Args (or Attributes) of a class's docstring says of each field.

    Raises:
        ValueError: it says nothing of a field; the message names all such fields.
    """
    text = inspect.cleandoc(cls.__doc__ or "")
    found: dict[str, str] = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n?|\n(?= ))+)", text, re.MULTILINE):
        for name, meaning in re.findall(r"^(\w+): (.*(?:\n {4,}.*)*)", textwrap.dedent(section), re.MULTILINE):
            found[name] = " ".join(meaning.split())
    if missing := [field.name for field in dataclasses.fields(cls) if field.name not in found]:
        raise ValueError(f"the docstring of {cls.__module__}.{cls.__qualname__} does not say what {missing} mean")
    return found


def _comments_by_line(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return the comments that have a line of their own, and those after code, by line number."""
    whole_lines, after_code = {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("#").strip()
            (after_code if token.line[: token.start[1]].strip() else whole_lines)[token.start[0]] = text
    return whole_lines, after_code


def _lines_above(line: int, whole_lines: dict[int, str]) -> list[str]:
    first = line
    while first - 1 in whole_lines:
        first -= 1
    return [whole_lines[number] for number in range(first, line)]


def default(field: dataclasses.Field[Any]) -> str | None:
    """Return a field's default as YAML on one line, or None if it has none."""
    if field.default is not dataclasses.MISSING:
        return as_yaml(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return as_yaml(field.default_factory())
    return None


def as_yaml(value: Any) -> str:
    """Return a value of the configuration as YAML on one line."""
    if dataclasses.is_dataclass(value):
        return DEFAULTS_OF_KEYS
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)
    if isinstance(value, float) and value != 0 and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.12g}"
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump(plain, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()


def in_words(hint: Any) -> str:
    """Return what values of a type are: "integer ≥ 1", "`padded`, `dynamic` or `packed`", "number > 0, or null"."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return in_words(arguments[0]) + _limits(arguments[1:])
    if origin is Literal:
        return " or ".join(filter(None, [", ".join(f"`{v}`" for v in arguments[:-1]), f"`{arguments[-1]}`"]))
    if origin in (Union, UnionType):
        words = [in_words(argument) for argument in arguments if argument is not NoneType]
        return " or ".join(words) + (", or null" if NoneType in arguments else "")
    if origin is tuple:
        return f"list of {in_words(arguments[0])}s"
    if origin is dict:
        return "mapping"
    if dataclasses.is_dataclass(hint):
        return "mapping"
    return _WORDS[hint]


def _limits(metadata: tuple[Any, ...]) -> str:
    """Return the bounds that pydantic's metadata sets, as in " in [0, 1)"."""
    bounds: dict[str, Any] = {}
    for constraint in _constraints(metadata):
        for name in ("ge", "gt", "le", "lt"):
            if isinstance(constraint, getattr(annotated_types, name.capitalize())):
                bounds[name] = as_yaml(getattr(constraint, name)).removesuffix(".0")
        if pattern := getattr(constraint, "pattern", None):
            return f" that matches `{pattern}`".replace("|", "\\|")
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if low is not None and high is not None:
        return f" in {'[' if 'ge' in bounds else '('}{low}, {high}{']' if 'le' in bounds else ')'}"
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return "".join(f" {signs[name]} {bound}" for name, bound in bounds.items())


def _constraints(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for each in metadata:
        if isinstance(each, FieldInfo):
            yield from each.metadata
        else:
            yield each

"""Translate the settings of another library into an experiment, with comments that name where each key comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import yaml

from rl_megatron.config import schema
from rl_megatron.config.errors import shorten_value
from rl_megatron.config.migration.keys import Expression
from rl_megatron.config.migration.read import Source

_DEFAULT = "default of "
_PRESETS = ("model", "loss", "algorithm")  # keys whose value chooses a file of the group of their name
_ORDER = ("output_dir", "init_from", "resume", *(name.name for name in fields(schema.StageConfig)), "metric_sinks")


@dataclass
class Translation:
    """What an experiment has of a file.

    Attributes:
        values: Keys here with their values.
        comments: Keys here with the keys of the file that they come from, as a comment names them.
        missing: Settings of the file without a counterpart, with the reason and what to do instead.
        different: Settings whose keys here come close, with the difference.
        unknown: Settings of the file that the table does not have.
        unread: Beginnings of keys that the file's other settings turn off, with the reason.
    """

    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, list[str]] = field(default_factory=dict)
    missing: list[tuple[str, str]] = field(default_factory=list)
    different: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


def translate(source: Source) -> Translation:
    """Return the settings of a file as keys here."""
    result, library = Translation(), source.library
    settings = {**source.defaults, **source.settings}
    unread = dict(library.find_unread(settings))
    for key in (*source.settings, *(key for key in source.defaults if key not in source.settings)):
        value = settings[key]
        beginning = next((beginning for beginning in unread if key.startswith(beginning)), None)
        if beginning is not None:
            if key in source.settings:
                result.unread[beginning] = unread[beginning]
            continue
        counterpart = library.find(key)
        setting = f"{key}={_show(value)}"
        if counterpart is None:
            if value != {}:  # a section without keys
                result.unknown.append(setting)
            continue
        converted = counterpart.translate(value, settings)
        is_default = key not in source.settings
        shown = f"{setting} (default)" if is_default else setting
        if isinstance(converted, tuple):
            converted, difference = converted
            result.different.append((shown, difference))
        if isinstance(converted, str):
            result.missing.append((shown, converted))
        for here, entry in converted.items() if isinstance(converted, Mapping) else ():
            is_short = entry == value or isinstance(value, list | dict) or key in library.sections
            comment = (
                key
                if is_short
                else f"{setting} ({counterpart.note})"
                if counterpart.note and here not in _PRESETS
                else setting
            )
            _add(result, here, entry, f"{_DEFAULT}{library.name}: {setting}" if is_default else comment)
    return result


def _add(result: Translation, here: str, value: Any, comment: str) -> None:
    """Add a value. Lists and mappings of several keys are joined; another value of a key is reported as missing."""
    if here not in result.values:
        result.values[here], result.comments[here] = value, [comment]
        return
    present = result.values[here]
    if isinstance(present, list) and isinstance(value, list):
        result.values[here] = present + [entry for entry in value if entry not in present]
    elif isinstance(present, dict) and isinstance(value, dict):
        result.values[here] = {**value, **present}
    elif present != value:
        if here not in _PRESETS and not comment.startswith(_DEFAULT):
            first = result.comments[here][0]
            result.missing.append((comment, f"it sets {here} too, which is {_show(present)} by {first}; choose one"))
        return
    if not comment.startswith(_DEFAULT):
        result.comments[here].append(comment)


def write_experiment(source: Source) -> str:
    """Return the text of an experiment, with what has no counterpart in comments at its end."""
    result = translate(source)
    return "\n".join((*_header(source, result), *_body(result), *_footer(source, result))) + "\n"


def _header(source: Source, result: Translation) -> Iterator[str]:
    algorithm = result.values.get("algorithm", "sft")
    yield "# @package _global_"
    yield f"# {str(algorithm).upper()} as in {source.file}, a file for {source.library.name}."
    yield "# Save it as DIR/experiment/NAME.yaml, and run: rl-megatron train --config-dir DIR experiment=NAME"
    if result.values.get("model") == "init_from":
        yield "# First import the model's directory, which `hf download` writes:"
        yield f"# rl-megatron convert import DIRECTORY {result.values['init_from']}"
    yield "defaults:"
    for preset in _PRESETS:
        if preset in result.values:
            yield f"  - override /{preset}: {result.values[preset]}  # {', '.join(result.comments[preset])}"


def _body(result: Translation) -> Iterator[str]:
    """Yield the lines of the keys, sections in the order of the schema."""
    tree: dict[str, Any] = {}
    for here in result.values:
        if here in _PRESETS:
            continue
        *sections, name = here.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = here
    ranked = sorted(tree, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    yield ""
    for name in ranked:
        yield from _lines(name, tree[name], result, "")


def _lines(name: str, node: Any, result: Translation, indent: str) -> Iterator[str]:
    if isinstance(node, str):
        yield f"{indent}{name}: {_to_yaml(result.values[node])}  # {', '.join(result.comments[node])}"
        return
    yield f"{indent}{name}:"
    for child, below in node.items():
        yield from _lines(child, below, result, f"{indent}  ")


def _footer(source: Source, result: Translation) -> Iterator[str]:
    for title, listed in (("Not quite the same", result.different), ("No counterpart", result.missing)):
        if listed:
            yield ""
            yield f"# {title}:"
            for setting, reason in listed:
                yield f"# - {setting}: {reason}"
    if result.unknown:
        yield ""
        yield f"# Not recognised, because the table of {source.library.name} does not have these keys:"
        for setting in result.unknown:
            yield f"# - {setting}"
    if result.unread:
        yield ""
        yield "# Not used in the file:"
        for beginning, reason in result.unread.items():
            yield f"# - {beginning.rstrip('.')}: {reason}"


def _show(value: object) -> str:
    """Return a value for a comment, as YAML on one line."""
    if isinstance(value, Expression):
        return " ".join(shorten_value(value).split())
    text = _to_yaml(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


class _Dumper(yaml.SafeDumper):
    """A dumper that writes every text on one line."""


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, '"' if "\n" in text else None)
)


def _to_yaml(value: object) -> str:
    text = yaml.dump(_plain(value), Dumper=_Dumper, default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: object) -> object:
    """Return a value that YAML can write: an expression becomes its text."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.text if isinstance(value, Expression) else value

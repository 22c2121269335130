"""Calls of tools, as the policy writes them in a turn, and what the parsers of all formats share."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MOST_CALLS = 256  # read in a turn; the limit keeps the time linear in the turn's length
_LONGEST_SHOWN = 200  # characters of a call in a message
_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: The id of the call, which its answer repeats. A parser leaves it empty unless the model wrote one.
        name: The name of the tool.
        arguments: The arguments by name, as JSON values.
    """

    id: str
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class MalformedCall:
    """A text that is meant as a call but cannot be read.

    Attributes:
        text: The text, which may be cut.
        reason: What is wrong with it.
        id: See `ToolCall`.
    """

    text: str
    reason: str
    id: str = ""


FoundCall = ToolCall | MalformedCall
# The JSON schema of the arguments of each tool, by its name.
Parameters = Mapping[str, Mapping[str, Any]]
# A parser takes the text of a turn after its thinking. It returns the calls in their order.
Parser = Callable[[str, Parameters], Sequence[FoundCall]]


class BadCall(ValueError):
    """The error for a text that is not a call in the model's format."""


def explain_cut(calls: Sequence[FoundCall], limit: str) -> Sequence[FoundCall]:
    """Return the calls of a turn that was cut at `limit`; if the last one is malformed, its reason mentions the cut."""
    last = calls[-1]
    if not isinstance(last, MalformedCall):
        return calls
    return [*calls[:-1], replace(last, reason=f"{last.reason}; the turn was cut at {limit}: raise it for longer calls")]


def drop_thinking(text: str) -> str:
    """Return the text of a turn after its thinking; "" if the thinking has no end."""
    for begin, end in _THINKING:
        thinking, end_tag, rest = text.partition(end)
        if end_tag:
            text = rest
        elif thinking.lstrip().startswith(begin):
            return ""
    return text


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, after white space, and the index after it, or raise BadCall."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise BadCall(f"is not JSON: {error.msg} at character {error.pos - start + 1}") from error
    except (ValueError, RecursionError) as error:  # also if values are nested too deeply
        raise BadCall(f"is not JSON that can be read: {error}") from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a value of JSON")


def _refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has a key twice")
    return values


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicate_keys)


def read_call(value: object, arguments_key: str = "arguments") -> ToolCall:
    """Return the call that a JSON object describes, or raise BadCall."""
    if not isinstance(value, dict):
        raise BadCall(f"is the JSON of {type(value).__name__}, but must be an object with 'name' and {arguments_key!r}")
    for key, type_, word in (("name", str, "a string"), (arguments_key, dict, "an object")):
        if key not in value:
            raise BadCall(f"has no {key!r}")
        if not isinstance(value[key], type_):
            raise BadCall(f"has {key!r} of type {type(value[key]).__name__}, but it must be {word}")
    id_ = value.get("id", "")
    return ToolCall(id_ if isinstance(id_, str) else "", value["name"], value[arguments_key])


def refuse_call(text: str, error: BadCall) -> MalformedCall:
    """Return a call that cannot be read; cut its text if it is long."""
    text = text.strip()
    return MalformedCall(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…", str(error))

"""The parser of the XML in which Qwen3-Coder writes calls."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from rl_megatron.rollouts.tools.calls import (
    MOST_CALLS,
    BadCall,
    FoundCall,
    Parameters,
    ToolCall,
    read_json,
    refuse_call,
)

_BEGIN = re.compile(r"<tool_call>\s*(<function=)")
_END = re.compile(r"(</function>)\s*</tool_call>")
_MEANT = re.compile(r"<tool_call>|<function=")
_FUNCTION = re.compile(r"<function=([^<>\n]*)>(.*)</function>", re.DOTALL)
_SOMETHING = re.compile(r"\S")
# A value may contain its own end tag, so it ends only before the next parameter or the end of the function.
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]*)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=[^<>\n]*>|\Z))", re.DOTALL
)


def parse_qwen(text: str, parameters: Parameters) -> list[FoundCall]:
    """Return the calls `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>` of a text.

    A value is text if its type in the schema is string, and otherwise JSON or a Python literal.
    """
    calls: list[FoundCall] = []
    position, ends = 0, True  # `ends`: whether an end tag may still follow
    while len(calls) < MOST_CALLS and (meant := _MEANT.search(text, position)) is not None:
        begin, end = _BEGIN.match(text, meant.start()), None
        if begin is not None and ends:
            end = _END.search(text, begin.end())
            ends = end is not None
        if begin is None or end is None:
            following = text.find("<tool_call>", meant.start() + 1)
            position = following if following >= 0 else len(text)
            calls.append(refuse_call(text[meant.start() : position], _explain(text[meant.start() : position])))
            continue
        position = end.end()
        try:
            calls.append(_read_call(text[begin.start(1) : end.end(1)], parameters))
        except BadCall as error:
            calls.append(refuse_call(text[begin.start() : position], error))
    return calls


def _explain(text: str) -> BadCall:
    if text.startswith("<function="):
        return BadCall("is not within <tool_call> and </tool_call>")
    return BadCall("is not <tool_call><function=NAME>…</function></tool_call>")


def _read_call(function: str, parameters: Parameters) -> ToolCall:
    match = _FUNCTION.fullmatch(function)
    name = "" if match is None else match[1].strip()
    if match is None or not name:
        raise BadCall("has no name; write <function=NAME>")
    properties: Mapping[str, Any] = parameters.get(name, {}).get("properties", {})
    arguments: dict[str, Any] = {}
    position, inside = 0, match[2]
    while _SOMETHING.search(inside, position):
        parameter = _PARAMETER.match(inside, position)
        if parameter is None:
            raise BadCall(f"has {inside[position:].strip()[:40]!r} where <parameter=KEY>…</parameter> should be")
        key = parameter[1].strip()
        if key in arguments:
            raise BadCall(f"has the parameter {key!r} twice")
        arguments[key] = _read_value(parameter[2], properties.get(key, {}))
        position = parameter.end()
    return ToolCall("", name, arguments)


def _read_value(text: str, schema: Mapping[str, object]) -> object:
    """Return a text's value. A text that is neither JSON nor a literal is returned as it is, and then refused."""
    if schema.get("type") == "string":
        return None if schema.get("nullable") and text in ("None", "null") else text
    try:
        value, end = read_json(text, 0)
        if not text[end:].strip():
            return value
    except BadCall:
        pass  # the template writes Python's True, False and None
    try:
        value = ast.literal_eval(text.strip())
        json.dumps(value, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return text
    return value

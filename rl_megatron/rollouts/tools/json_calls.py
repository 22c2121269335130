"""Parsers of calls that are written as JSON: the formats of Hermes, Llama and Mistral."""

from __future__ import annotations

import re

from rl_megatron.rollouts.tools.calls import (
    MOST_CALLS,
    BadCall,
    FoundCall,
    Parameters,
    ToolCall,
    call_of,
    malformed,
    read_json,
)

_HERMES_BEGIN, _HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\{\s*"(?:name"\s*:\s*"|type"\s*:\s*"function")')
_MISTRAL_TAG = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]")


def hermes_calls(text: str, parameters: Parameters) -> list[FoundCall]:
    """Return the calls `<tool_call>{"name": …, "arguments": {…}}</tool_call>` of a text."""
    found: list[FoundCall] = []
    begin = text.find(_HERMES_BEGIN)
    while begin >= 0 and len(found) < MOST_CALLS:
        inside = begin + len(_HERMES_BEGIN)
        try:
            value, end = read_json(text, inside)
            call = call_of(value)
            end = _behind_space(text, end)
            if not text.startswith(_HERMES_END, end):
                raise BadCall(f"is not followed by {_HERMES_END}")
            found.append(call)
        except BadCall as error:
            end = _end_of_block(text, inside)
            found.append(malformed(text[begin:end], error))
        begin = text.find(_HERMES_BEGIN, end)
    return found


def llama_calls(text: str, parameters: Parameters) -> list[FoundCall]:
    """Return the calls `{"name": …, "parameters": {…}}` of a text, which begin it or follow `<|python_tag|>`.

    Several calls are separated by semicolons. A text without the tag that begins with other JSON has no call.
    """
    _, tag, behind = text.partition(_LLAMA_TAG)
    text = (behind if tag else text).strip()
    if not tag and _LLAMA_CALL.match(text) is None:
        return []
    found: list[FoundCall] = []
    place = 0
    try:
        while len(found) < MOST_CALLS:
            value, end = read_json(text, place)
            if not tag and isinstance(value, dict) and "parameters" not in value and not found:
                return []  # an answer in JSON
            found.append(call_of(value, "parameters"))
            place = _behind_space(text, end)
            if place == len(text):
                return found
            if text[place] != ";":
                raise BadCall("has a text behind the call")
            place += 1
    except BadCall as error:
        found.append(malformed(text[place:], error))
    return found


def mistral_calls(text: str, parameters: Parameters) -> list[FoundCall]:
    """Return the calls of a text: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}`."""
    begin = text.find(_MISTRAL_TAG)
    if begin < 0:
        return []
    found: list[FoundCall] = []
    for part in _mistral_parts(text[begin:]):
        inside = part[len(_MISTRAL_TAG) :]
        try:
            found += _mistral_call(inside)
        except BadCall as error:
            found.append(malformed(part, error))
    return found


def _mistral_parts(text: str) -> list[str]:
    """Return the parts of a text that begin with the tag. A tag inside a JSON string begins none."""
    parts, begin = [], 0
    while len(parts) < MOST_CALLS:
        inside = begin + len(_MISTRAL_TAG)
        named = _MISTRAL_NAMED.match(text, inside)
        try:
            _, end = read_json(text, named.end() if named else inside)
        except BadCall:
            end = inside
        following = text.find(_MISTRAL_TAG, end)
        if following < 0:
            return [*parts, text[begin:]]
        parts.append(text[begin:following])
        begin = following
    return parts


def _mistral_call(inside: str) -> list[ToolCall]:
    named = _MISTRAL_NAMED.match(inside)
    if named:
        value, _ = read_json(inside, named.end())
        return [call_of({"name": named[1], "arguments": value, "id": named[2] or ""})]
    values, _ = read_json(inside, 0)
    if not isinstance(values, list) or not values:
        raise BadCall("is not a list of calls, and not name[ARGS]{…}")
    return [call_of(value) for value in values]


def _behind_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _end_of_block(text: str, inside: int) -> int:
    """Return where a block that cannot be read ends: behind its end tag, or before the next block."""
    following = text.find(_HERMES_BEGIN, inside)
    following = following if following >= 0 else len(text)
    end = text.find(_HERMES_END, inside, following)
    return end + len(_HERMES_END) if end >= 0 else following

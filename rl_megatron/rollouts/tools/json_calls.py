"""Parsers of calls that are written as JSON: the formats of Hermes, Llama and Mistral."""

from __future__ import annotations

import re

from rl_megatron.rollouts.tools.calls import (
    MOST_CALLS,
    BadCall,
    FoundCall,
    Parameters,
    ToolCall,
    read_call,
    read_json,
    refuse_call,
)

_HERMES_BEGIN, _HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA_TAG = "<|python_tag|>"
_LLAMA_CALL = re.compile(r'\{\s*"(?:name"\s*:\s*"|type"\s*:\s*"function")')
_MISTRAL_TAG = "[TOOL_CALLS]"
_MISTRAL_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?\[ARGS\]")


def parse_hermes(text: str, parameters: Parameters) -> list[FoundCall]:
    """Return the calls `<tool_call>{"name": …, "arguments": {…}}</tool_call>` of a text."""
    calls: list[FoundCall] = []
    begin = text.find(_HERMES_BEGIN)
    while begin >= 0 and len(calls) < MOST_CALLS:
        inside = begin + len(_HERMES_BEGIN)
        try:
            value, end = read_json(text, inside)
            call = read_call(value)
            end = _skip_space(text, end)
            if not text.startswith(_HERMES_END, end):
                raise BadCall(f"is not followed by {_HERMES_END}")
            calls.append(call)
        except BadCall as error:
            end = _find_end_of_block(text, inside)
            calls.append(refuse_call(text[begin:end], error))
        begin = text.find(_HERMES_BEGIN, end)
    return calls


def parse_llama(text: str, parameters: Parameters) -> list[FoundCall]:
    """Return the calls `{"name": …, "parameters": {…}}` of a text, which begin the text or follow `<|python_tag|>`.

    Several calls are separated by semicolons. Without the tag, a text that begins with other JSON has no call.
    """
    _, tag, tagged = text.partition(_LLAMA_TAG)
    text = (tagged if tag else text).strip()
    if not tag and _LLAMA_CALL.match(text) is None:
        return []
    calls: list[FoundCall] = []
    start = 0
    try:
        while len(calls) < MOST_CALLS:
            value, end = read_json(text, start)
            if not tag and isinstance(value, dict) and "parameters" not in value and not calls:
                return []  # an answer in JSON
            calls.append(read_call(value, "parameters"))
            start = _skip_space(text, end)
            if start == len(text):
                return calls
            if text[start] != ";":
                raise BadCall("has text after the call")
            start += 1
    except BadCall as error:
        calls.append(refuse_call(text[start:], error))
    return calls


def parse_mistral(text: str, parameters: Parameters) -> list[FoundCall]:
    """Return the calls of a text: `[TOOL_CALLS][{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]name[ARGS]{…}`."""
    begin = text.find(_MISTRAL_TAG)
    if begin < 0:
        return []
    calls: list[FoundCall] = []
    for part in _split_mistral(text[begin:]):
        inside = part[len(_MISTRAL_TAG) :]
        try:
            calls += _read_mistral(inside)
        except BadCall as error:
            calls.append(refuse_call(part, error))
    return calls


def _split_mistral(text: str) -> list[str]:
    """Return the parts of a text that begin with the tag. A tag inside a JSON string does not begin a part."""
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


def _read_mistral(inside: str) -> list[ToolCall]:
    named = _MISTRAL_NAMED.match(inside)
    if named:
        value, _ = read_json(inside, named.end())
        return [read_call({"name": named[1], "arguments": value, "id": named[2] or ""})]
    values, _ = read_json(inside, 0)
    if not isinstance(values, list) or not values:
        raise BadCall("is not a list of calls, and not name[ARGS]{…}")
    return [read_call(value) for value in values]


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _find_end_of_block(text: str, inside: int) -> int:
    """Return where a block that cannot be read ends: after its end tag, or before the next block."""
    following = text.find(_HERMES_BEGIN, inside)
    following = following if following >= 0 else len(text)
    end = text.find(_HERMES_END, inside, following)
    return end + len(_HERMES_END) if end >= 0 else following

"""Bodies of requests: how large they may be, and their JSON.

Sizes follow from what the context can hold. Threads read bodies, so nothing here keeps the interpreter's lock for long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from json import decoder, scanner
from typing import Any

from rl_megatron.rollouts.gateway.errors import RequestRefused
from rl_megatron.rollouts.limits import HistoryFull

MOST_LEVELS = 64
_LEAST_BYTES, _BYTES_OF_A_TOKEN = 1 << 20, 16  # a conversation is sent with what its template leaves out, too
_LEAST_VALUES = 10_000
_OF_THE_CONTEXT = ("messages", "prompt", "tools")  # the parameters that become tokens
_SHORT = 1 << 16  # characters that the decoder in C reads in a few milliseconds


@dataclass(frozen=True)
class BodyLimits:
    """What the bodies of a trajectory may have.

    Attributes:
        context: The most tokens of a history.
        longest_token: The most characters of a token.
    """

    context: int
    longest_token: int

    @property
    def num_bytes(self) -> int:
        """Return the most bytes of a body. A token is rarely more than nine of them, escaped."""
        return _LEAST_BYTES + _BYTES_OF_A_TOKEN * self.context

    @property
    def characters(self) -> int:
        """Return the most characters of a text: more of them are more tokens than the context has."""
        return self.context * self.longest_token

    @property
    def values(self) -> int:
        """Return the most lists and objects of a long body, and the most values of a message or another parameter.

        Each costs a token or more; small contexts get some that no template writes.
        """
        return max(_LEAST_VALUES, self.context)


def read_body(raw: bytes, limits: BodyLimits) -> Mapping[str, Any]:
    """Return the body of a request.

    Raises:
        RequestRefused: It is not a JSON object, is nested too deep, or has text that is not Unicode.
        HistoryFull: Its messages, prompt or tools are more than fits the context.
    """
    try:
        body = read_json(raw, limits.values)
    except RecursionError as error:
        raise RequestRefused(_too_deep("the body")) from error
    except ValueError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    check_value(dict.fromkeys(body), "the body", limits)
    for where, value in _parameters(body, limits):
        check_value(value, where, limits)
    return body


def _parameters(body: Mapping[str, Any], limits: BodyLimits) -> Iterator[tuple[str, Any]]:
    for name, value in body.items():
        if name == "messages" and isinstance(value, list):
            yield from ((f"messages[{number}]", message) for number, message in enumerate(value))
        else:
            yield name, value


def check_value(value: Any, where: str, limits: BodyLimits) -> None:
    """Check a JSON value, level by level, because a deep one must not be walked by recursion.

    Raises:
        RequestRefused: It is nested too deep or too large, or has text that is not Unicode.
        HistoryFull: It is too large, and would become tokens.
    """
    level, number = [value], 0
    for _ in range(MOST_LEVELS + 1):  # the last one has no lists and objects
        number += len(level)
        if number > limits.values:
            raise _too_large(where, f"more than {limits.values} values, and the context {limits.context} tokens")
        deeper: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _check_text(each, where, limits)
            elif isinstance(each, dict):
                for key in each:
                    _check_text(key, where, limits)
                deeper += each.values()
            elif isinstance(each, list):
                deeper += each
        if not deeper:
            return
        level = deeper
    raise RequestRefused(_too_deep(where), param=where)


def _check_text(text: str, where: str, limits: BodyLimits) -> None:
    if len(text) > limits.characters:
        raise _too_large(
            where,
            f"a text of {len(text)} characters, and the context at most {limits.characters}: {limits.context} tokens "
            f"with {limits.longest_token} characters each",
        )
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RequestRefused(f"{where} has {half!r}, half of a surrogate pair, which is not a character") from error


def _too_large(where: str, what: str) -> Exception:
    if where.startswith(_OF_THE_CONTEXT):
        return HistoryFull(f"{where} has {what}")
    return RequestRefused(f"{where} has {what}", param=where)


def _too_deep(where: str) -> str:
    return f"{where} is nested too deep: lists and objects may have {MOST_LEVELS} levels"


class _Yielding(json.JSONDecoder):
    """The decoder in Python, during which other threads run."""

    def __init__(self, most: int) -> None:
        """Let more lists and objects than `most` raise `HistoryFull`: the garbage collector would walk through them."""
        super().__init__()
        self._most = self._left = most
        self.parse_array = self._counting(decoder.JSONArray)  # pyright: ignore[reportAttributeAccessIssue]
        self.parse_object = self._counting(decoder.JSONObject)  # pyright: ignore[reportAttributeAccessIssue]
        self.scan_once = scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue]

    def _counting(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def parse_counted(*arguments: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise HistoryFull(
                    f"the body has more than {self._most} lists and objects, each of which takes a token or more"
                )
            return parse(*arguments)

        return parse_counted


def read_json(text: str | bytes, most: int) -> Any:
    """Return what a JSON text says. Other threads run meanwhile.

    Args:
        text: The text.
        most: The most lists and objects of a long text.

    Raises:
        ValueError: It is not JSON.
        RecursionError: It is nested too deep.
        HistoryFull: It has more lists and objects.
    """
    return json.loads(text) if len(text) <= _SHORT else json.loads(text, cls=_Yielding, most=most)


def write_json(value: Any) -> str:
    """Return a value as JSON with sorted keys. Other threads run meanwhile."""
    return "".join(json.JSONEncoder(sort_keys=True).iterencode(value))

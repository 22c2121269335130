"""Bodies of requests: their size limits, their JSON, and the error that refuses them.

The limits follow from the context length. Threads read bodies, so nothing here holds the GIL for long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from json import decoder, scanner
from typing import Any

from rl_megatron.rollouts.trajectory import HistoryFull

MOST_LEVELS = 64
_LEAST_BYTES, _BYTES_OF_A_TOKEN = 1 << 20, 16  # requests also have text that templates leave out
_LEAST_VALUES = 10_000
_CONTEXT_PARAMETERS = ("messages", "prompt", "tools")  # the parameters that become tokens
_MOST_CHARACTERS = 1000  # of an error message, which may show a value of the request
_SHORT = 1 << 16  # characters that the decoder in C reads in a few milliseconds


class RequestRefused(Exception):
    """The error that answers a request, in the format of OpenAI's API.

    Attributes:
        status: The HTTP status.
        message: What is wrong, and what to change.
        param: The parameter that the error is about; None if it is about none.
        code: A code that programs can compare; None if the error has none.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None):
        message = message if len(message) <= _MOST_CHARACTERS else f"{message[:_MOST_CHARACTERS]}…"
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code

    @property
    def body(self) -> dict[str, object]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class BodyLimits:
    """The size limits of requests, which follow from the context length and the characters of the longest token."""

    context: int
    longest_token: int

    @property
    def num_bytes(self) -> int:
        """Return the most bytes that a body may have. A token with JSON escapes rarely has more than nine bytes."""
        return _LEAST_BYTES + _BYTES_OF_A_TOKEN * self.context

    @property
    def characters(self) -> int:
        """Return the most characters that a text may have: a longer one has more tokens than fit the context."""
        return self.context * self.longest_token

    @property
    def values(self) -> int:
        """Return the limit on the lists and objects of a long body, and on the values of a message or other parameter.

        A template turns each of these into at least one token. Small contexts get a higher limit, because requests
        also have values that no template writes.
        """
        return max(_LEAST_VALUES, self.context)


def read_body(raw: bytes, limits: BodyLimits) -> Mapping[str, object]:
    """Return the body of a request.

    Raises:
        RequestRefused: It is not a JSON object, is nested too deeply, or has text that is not Unicode.
        HistoryFull: Its messages, prompt or tools do not fit the context.
    """
    try:
        body = read_json(raw, limits.values)
    except RecursionError as error:
        raise RequestRefused(_describe_depth("the body")) from error
    except ValueError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestRefused("the body must be a JSON object")
    check_value(dict.fromkeys(body), "the body", limits)
    for where, value in _split_body(body):
        check_value(value, where, limits)
    return body


def _split_body(body: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for name, value in body.items():
        if name == "messages" and isinstance(value, list):
            yield from ((f"messages[{number}]", message) for number, message in enumerate(value))
        else:
            yield name, value


def check_value(value: object, where: str, limits: BodyLimits) -> None:
    """Check a JSON value level by level, because recursion would overflow on a deep one.

    Raises:
        RequestRefused: It is nested too deeply, has text that is not Unicode, or is too large.
        HistoryFull: It is too large, and the parameter is one that becomes tokens.
    """
    level, number = [value], 0
    for _ in range(MOST_LEVELS + 1):  # the last level has no lists or objects
        number += len(level)
        if number > limits.values:
            raise _refuse_size(where, f"more than {limits.values} values, but the context {limits.context} tokens")
        deeper: list[object] = []
        for item in level:
            if isinstance(item, str):
                _check_text(item, where, limits)
            elif isinstance(item, dict):
                for key in item:
                    _check_text(key, where, limits)
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
        if not deeper:
            return
        level = deeper
    raise RequestRefused(_describe_depth(where), param=where)


def _check_text(text: str, where: str, limits: BodyLimits) -> None:
    if len(text) > limits.characters:
        raise _refuse_size(
            where,
            f"a text of {len(text)} characters, but the context at most {limits.characters}: {limits.context} tokens "
            f"with {limits.longest_token} characters each",
        )
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise RequestRefused(f"{where} has {half!r}, half of a surrogate pair, which is not a character") from error


def _refuse_size(where: str, what: str) -> Exception:
    if where.startswith(_CONTEXT_PARAMETERS):
        return HistoryFull(f"{where} has {what}")
    return RequestRefused(f"{where} has {what}", param=where)


def _describe_depth(where: str) -> str:
    return f"{where} is nested too deep: lists and objects may have {MOST_LEVELS} levels"


class _Yielding(json.JSONDecoder):
    """The JSON decoder in pure Python, which lets other threads run."""

    def __init__(self, most: int) -> None:
        """Raise HistoryFull for more than `most` lists and objects: they would slow down the garbage collector."""
        super().__init__()
        self._most = self._left = most
        self.parse_array = self._count(decoder.JSONArray)  # pyright: ignore[reportAttributeAccessIssue]
        self.parse_object = self._count(decoder.JSONObject)  # pyright: ignore[reportAttributeAccessIssue]
        self.scan_once = scanner.py_make_scanner(self)  # pyright: ignore[reportAttributeAccessIssue]

    def _count(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def parse_counted(*arguments: object) -> object:
            self._left -= 1
            if self._left < 0:
                raise HistoryFull(
                    f"the body has more than {self._most} lists and objects, each of which takes a token or more"
                )
            return parse(*arguments)

        return parse_counted


def read_json(text: str | bytes, most: int) -> Any:
    """Return the value of a JSON text, and let other threads run meanwhile.

    Raises:
        ValueError: It is not JSON.
        RecursionError: It is nested too deeply.
        HistoryFull: It is long, and has more than `most` lists and objects.
    """
    return json.loads(text) if len(text) <= _SHORT else json.loads(text, cls=_Yielding, most=most)


def write_json(value: object) -> str:
    """Return a value as JSON with sorted keys, and let other threads run meanwhile."""
    return "".join(json.JSONEncoder(sort_keys=True).iterencode(value))

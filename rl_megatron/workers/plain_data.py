"""Plain data, the only data that a process with users' code may send. Decoding it runs no code, whoever encoded it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

_SCALARS: tuple[Any, ...] = (bool, int, float, str, bytes)


class BadAnswer(ValueError):
    """The error for a result of users' code that cannot be used. The message completes "the method …"."""


def to_plain(value: object, where: str = "the result") -> object:
    """Convert a value to None, bool, int, float, str, bytes, and lists, tuples, sets and dicts of them.

    Arrays and tensors become lists, and instances of dataclasses become dicts of their fields.

    Raises:
        BadAnswer: A part of it cannot be converted. The message calls the value `where`.
    """
    if value is None or type(value) in _SCALARS:
        return value
    for kind in _SCALARS:
        if isinstance(value, kind):
            return kind(value)  # the value of an enumeration, for example
    if isinstance(value, Mapping):
        return {
            to_plain(key, f"a key of {where}"): to_plain(item, f"{where}[{key!r:.40}]") for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        items = (to_plain(item, f"{where}[{number}]") for number, item in enumerate(value))
        return list(items) if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return {to_plain(item, f"an item of {where}") for item in value}
    if callable(as_list := getattr(value, "tolist", None)):
        return to_plain(as_list(), where)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name), f"{where}.{field.name}") for field in fields(value)}
    raise BadAnswer(
        f"returned a {type(value).__name__} ({where}), which cannot leave the process; return numbers, texts, and "
        "lists and mappings of them"
    )


def dump_plain(message: tuple[object, ...]) -> bytes:
    """Encode a message of plain data for `load_plain`."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def load_plain(payload: bytes) -> object:
    """Decode a message of `dump_plain`.

    Raises:
        Exception: Of any kind, if the bytes are not a pickle, or if the pickle names a class or a function.
    """
    return _PlainUnpickler(io.BytesIO(payload)).load()


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that imports nothing and calls nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a message names {module}.{name}, but only plain data is allowed")

"""The functions that a script passes to a training function as they are, so that a rerun can notice other code.

The configuration has only their names.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

_digests: dict[str, str] = {}


def record_function(name: str, function: Callable[..., Any]) -> None:
    """Record the code of a function under the name that the configuration has for it."""
    _digests[name] = hashlib.sha256(_code(function).encode()).hexdigest()[:32]


def function_digest(name: str) -> str | None:
    """Return a digest of the code of a recorded function, or None if no function of this name is recorded."""
    return _digests.get(name)


def _code(function: Any) -> str:
    """Return the source of a function, or of the class of an object that is called; its bytecode without a source."""
    if isinstance(function, functools.partial):
        return f"{_code(function.func)} {function.args} {function.keywords}"
    is_code = inspect.isroutine(function) or inspect.isclass(function)
    try:
        return inspect.getsource(function if is_code else type(function))
    except (OSError, TypeError):  # it was typed into an interpreter, for example
        code = getattr(function, "__code__", None)
        return "" if code is None else f"{code.co_code.hex()} {code.co_consts} {code.co_names}"

"""`ConfigError`, the error for bad input, and messages that name the nearest valid choice."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")

STOPPED = 75  # the exit status of a run that ended early and that the same command continues: sysexits.h's EX_TEMPFAIL


class ConfigError(ValueError):
    """The error for bad input. The message names the key or file, the value, the rule and the remedy.

    Nearly all are raised before the first step. A reward that is not finite raises one when it is returned.
    """


class RunFailed(RuntimeError):
    """An error that ends a started run with exit status 1. All ranks raise it, unless a subclass says otherwise."""


def describe_error(error: BaseException) -> str:
    """Return an exception's type and message."""
    return f"{type(error).__name__}: {error}"


def describe_with_place(error: BaseException) -> str:
    """Return an exception's type and message, and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        message = " ".join(str(error).split())
    except Exception:  # a user's exception may fail to format its message
        message = "its message cannot be read"
    return f"{type(error).__name__}{': ' if message else ''}{message}{location}"


_LONGEST_VALUE = 200  # characters of a value in a message
_SHORT_LIST = 8  # a longer list of names would hide the hint


def shorten_value(value: object) -> str:
    """Return the repr of a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def nearest(name: object, choices: Iterable[str], *, lists_all: bool = False) -> str:
    """Return the end of a message about an unknown name: the nearest known name, or a list of the known names.

    A short list is added to the nearest name, too, and with `lists_all` any list. `name` may be of any type, because
    users write it.
    """
    choices = sorted(choices)
    close = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    names = ", ".join(choices) or "none"
    if not close:
        return f"; known: {names}"
    return f"; did you mean {close[0]!r}?" + (f" Known: {names}" if lists_all or len(choices) <= _SHORT_LIST else "")


def unknown_name(kind: str, name: object, choices: Iterable[str]) -> ValueError:
    """Return the error for an unknown name: `unknown task 'gsm8'; did you mean 'gsm8k'?`."""
    return ValueError(f"unknown {kind} {name!r}{nearest(name, choices)}")


def convert_errors(build: Callable[[], _T]) -> _T:
    """Return `build()`; turn its ValueError or OSError, such as that of an unreadable file, into a ConfigError."""
    try:
        return build()
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error

"""The one error that users are meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Bad input, found before the first step: names the key or file, the value, the rule, and the remedy."""


_SHORT_LIST = 8  # names that can be shown without hiding the hint


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message on a mistyped name: the nearest known one, and all of them where they are few."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    names = ", ".join(known) or "none"
    if not close:
        return f"; known: {names}"
    return f"; did you mean {close[0]!r}?" + (f" Known: {names}" if len(known) <= _SHORT_LIST else "")


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not in a table: `unknown task 'gsm8'; did you mean 'gsm8k'?`."""
    return ValueError(f"unknown {kind} {name!r}{nearest(name, known)}")

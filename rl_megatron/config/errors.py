"""The one error that users are meant to read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Bad input, found before the first step: names the key or file, the value, the rule, and the remedy."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: `; did you mean 'x'?`, or the known names where none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"

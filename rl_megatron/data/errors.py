"""Errors that more than one file of this room raises."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is not in a table: it gives the nearest known name and all of them."""
    names = list(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
    return ValueError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names) or 'none'}.")

"""Show how far the preparation of data is, if it takes long."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rl_megatron import log

T = TypeVar("T")
_FIRST_SECONDS, _THEN_SECONDS = 2.0, 10.0
_BETWEEN = 64  # items between two looks at the clock


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items. After two seconds, and then from time to time, a line of the log says how many were taken.

    Args:
        items: The items.
        what: What is done to them, for the line, such as "tokenized records".
        total: Their number, if it is known.
    """
    began, due, done = time.monotonic(), _FIRST_SECONDS, 0
    for done, item in enumerate(items, 1):
        yield item
        if done % _BETWEEN == 0 and (taken := time.monotonic() - began) >= due:
            log.LOGGER.info("%s: %s%s", what, f"{done:,}", "" if total is None else f" of {total:,}")
            due = taken + _THEN_SECONDS
    if due > _FIRST_SECONDS:
        log.LOGGER.info("%s: %s in %.0f s", what, f"{done:,}", time.monotonic() - began)

"""Record what processes do in a profiled step: spans of time with names, on the wall clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """A time in which a process did something.

    Attributes:
        process: What people call the process, such as "rank 0" or "rollout engine 0 (process 17)".
        name: What it did.
        began: The begin, in nanoseconds since 1970.
        ended: The end.
    """

    process: str
    name: str
    began: int
    ended: int


_RECORDED: list[list[Span]] = []


@contextmanager
def recording_spans() -> Iterator[list[Span]]:
    """Yield a list to which the spans of this process are added during the block of a `with` statement."""
    spans: list[Span] = []
    _RECORDED.append(spans)
    try:
        yield spans
    finally:
        _RECORDED.remove(spans)


def record_span(process: str, name: str, began: int) -> None:
    """Add a span that ends now, if spans are recorded.

    Args:
        process: The process.
        name: What it did.
        began: What `time.time_ns` returned at its begin.
    """
    if _RECORDED:
        _RECORDED[-1].append(Span(process, name, began, time.time_ns()))

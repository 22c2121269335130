"""`QueuedSink`: a sink in a thread of its own, so that a service that blocks or fails neither stops nor slows a run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from rl_megatron import log
from rl_megatron.config.errors import describe_error
from rl_megatron.observability.sinks import MetricLine, MetricSink

MAX_LINES = 1000  # lines that wait for a sink; further ones are dropped
CLOSE_SECONDS = 15.0  # time that the end of a run waits for a sink
RETRY_SECONDS = 60.0  # time between attempts to open a sink


@runtime_checkable
class FailingSink(MetricSink, Protocol):
    """A sink that shows whether a run has failed."""

    def fail(self) -> None:
        """Mark the run as failed. `close` follows."""
        ...


class QueuedSink:
    """A metric sink that writes to another one in a thread, from a queue that holds `max_lines` lines.

    It owns the thread. The other sink is opened and called in that thread only. Lines that do not fit into the queue,
    and lines that the sink refuses by raising an error, are dropped and counted. The first of them is said in a
    warning, and their number at the end.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], MetricSink],
        max_lines: int = MAX_LINES,
        close_seconds: float = CLOSE_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
    ):
        """Start the thread.

        Args:
            name: What messages call the sink.
            open_sink: What opens the sink. It is tried again if it raises an error.
            max_lines: Lines that wait at most.
            close_seconds: Time that `close` waits at most.
            retry_seconds: Time between attempts to open the sink.
        """
        self._name, self._open, self._max_lines = name, open_sink, max_lines
        self._close_seconds, self._retry_seconds = close_seconds, retry_seconds
        self._changed = threading.Condition()
        self._waiting: deque[MetricLine | tuple[str, int]] = deque()  # lines, and beginnings of stages between them
        self._lines = self._given = self._written = 0  # lines that wait, that the run gave, and that were written
        self._is_closing = self._has_closed = self._has_failed = self._has_warned = False
        self._closes_until = 0.0
        self._thread = threading.Thread(target=self._run, name=f"metric sink {name}", daemon=True)
        self._thread.start()

    def begin_stage(self, stage: str, start: int) -> None:
        """Let the sink begin a stage, after the lines that wait."""
        with self._changed:
            self._waiting.append((stage, start))
            self._changed.notify()

    def write(self, line: MetricLine) -> None:
        """Add a line to the queue, or drop it if the queue is full."""
        with self._changed:
            self._given += 1
            is_full = self._lines >= self._max_lines
            if not is_full and not self._is_closing:
                self._waiting.append(line)
                self._lines += 1
                self._changed.notify()
        if is_full:
            self._warn(f"does not keep up with the run, and {self._max_lines} lines wait")

    def begin_to_close(self, has_failed: bool = False) -> None:
        """Let the sink write what waits and finish, and do not wait for it.

        Args:
            has_failed: Whether the run has failed. A sink with a method `fail` is told so before it is closed.
        """
        with self._changed:
            if not self._is_closing:
                self._is_closing, self._has_failed = True, has_failed
                self._closes_until = time.monotonic() + self._close_seconds
                self._changed.notify()

    def close(self) -> None:
        """Wait until the sink has finished, for a limited time, and say how many lines it lacks."""
        self.begin_to_close()
        if self._has_closed:
            return
        self._has_closed = True
        self._thread.join(max(0.0, self._closes_until - time.monotonic()))
        with self._changed:
            lacking = self._given - self._written
        if self._thread.is_alive():
            log.LOGGER.warning(
                "metric sink %s did not finish within %g s, and is left; %d of %d lines may be missing in it",
                self._name, self._close_seconds, lacking, self._given,
            )  # fmt: skip
        elif lacking:
            log.LOGGER.warning("metric sink %s lacks %d of %d lines", self._name, lacking, self._given)

    def _run(self) -> None:
        sink = self._opened()
        if sink is None:
            return
        while (entry := self._next()) is not None:
            try:
                if isinstance(entry, MetricLine):
                    sink.write(entry)
                else:
                    sink.begin_stage(*entry)
            except Exception as error:  # whatever a library raises must not end the run
                if not self._has_warned:
                    self._warn(describe_error(error))
            else:
                with self._changed:
                    self._written += isinstance(entry, MetricLine)
        try:
            if self._has_failed and isinstance(sink, FailingSink):
                sink.fail()
            sink.close()
        except Exception as error:  # as above
            log.LOGGER.warning(
                "metric sink %s failed when it was closed: %s", self._name, log.make_printable(describe_error(error))
            )

    def _opened(self) -> MetricSink | None:
        """Return the sink, or None if the run ends before it could be opened."""
        while True:
            try:
                return self._open()
            except Exception as error:  # as above
                self._warn(
                    f"cannot be opened, and is tried again every {self._retry_seconds:g} s: {describe_error(error)}"
                )
            again = time.monotonic() + self._retry_seconds
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closing, max(0.0, again - time.monotonic())):
                    return None

    def _next(self) -> MetricLine | tuple[str, int] | None:
        """Wait for the next entry, and return it, or None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            entry = self._waiting.popleft()
            self._lines -= isinstance(entry, MetricLine)
            return entry

    def _warn(self, reason: str) -> None:
        """Warn of the first problem; the others are counted."""
        if not self._has_warned:
            self._has_warned = True
            log.LOGGER.warning(
                "metric sink %s %s; the run goes on, lines that the sink does not get are dropped, and their number is "
                "said at the end (metrics.jsonl has them all)",
                self._name, log.make_printable(reason),
            )  # fmt: skip

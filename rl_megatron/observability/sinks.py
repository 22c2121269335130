"""Metric sinks: files that metrics are written to, and `QueuedSink`, which keeps a slow service from slowing a run."""

from __future__ import annotations

import io
import itertools
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol, runtime_checkable

from rl_megatron import disk, log
from rl_megatron.config.errors import ConfigError, describe_error, nearest
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.loggers import LoggerConfig
from rl_megatron.config.metrics import METRICS_FILE
from rl_megatron.observability.recorded_metrics import drop_later_lines

CLOSE_SECONDS = 15.0  # how long a run waits at its end for the sinks of services
_MAX_LINES = 1000  # how many lines may wait for a service's sink; further lines are dropped
_RETRY_SECONDS = 60.0  # between attempts to open a sink of a service
_EVENT_FILES = itertools.count()  # numbers for the file names of a process's TensorBoard writers


@dataclass(frozen=True)
class MetricLine:
    """The metrics of one training step or one evaluation.

    Attributes:
        stage: The name of the run's stage.
        step: The training step, from 1; an evaluation before the first step has step 0.
        kind: "train" or "eval".
        metrics: The values by name (see `config.metrics`).
        seconds: The wall-clock time since the previous line, or since the stage began.
    """

    stage: str
    step: int
    kind: str
    metrics: dict[str, float]
    seconds: float


class MetricSink(Protocol):
    """A file or a service that metrics are written to. Only rank 0 has sinks."""

    def begin_stage(self, stage: str, start: int) -> None:
        """Prepare for the steps of a stage after step `start`.

        If an interrupted run wrote lines of later steps, these are written again.
        """
        ...

    def write(self, line: MetricLine) -> None:
        """Write one line, so that it is not lost if the run is killed afterwards.

        Raises:
            OSError: The disk is full (ENOSPC), and no part of the line was written. The caller tries again later.
        """
        ...

    def close(self) -> None:
        """Finish writing. Nothing is written afterwards."""
        ...


@runtime_checkable
class FailingSink(MetricSink, Protocol):
    """A sink that shows whether a run has failed."""

    def fail(self) -> None:
        """Mark the run as failed. `close` follows."""
        ...


# The constructors of sinks, which take the run's output directory.
SINKS: Registry[Callable[[Path], MetricSink]] = Registry("metric sink")
register_sink = SINKS.register


def check_sinks(names: Sequence[str]) -> None:
    """Refuse unknown metric sinks, and a list without "jsonl": curves.png and a resumed run need its file."""
    for name in names:
        if name not in SINKS:
            services = {service.name for service in fields(LoggerConfig)}
            remedy = f"; to send metrics there, set logger.{name}=true" if name in services else nearest(name, SINKS)
            raise ConfigError(f"metric_sinks: there is no metric sink {name!r}{remedy}")
    if "jsonl" not in names:
        raise ConfigError(f"metric_sinks={list(names)}: curves.png is drawn from jsonl's file; add jsonl")


@register_sink("jsonl")
class JsonlSink:
    """The file metrics.jsonl, with one JSON object per line and metrics in full precision."""

    def __init__(self, output_dir: Path):
        self._path = output_dir / METRICS_FILE

    def begin_stage(self, stage: str, start: int) -> None:
        """Drop the lines of this stage after step `start`, and all lines that cannot be read."""
        drop_later_lines(self._path, stage, start)

    def write(self, line: MetricLine) -> None:
        """Append the line to the file."""
        values = {
            "stage": line.stage,
            "step": line.step,
            "kind": line.kind,
            **line.metrics,
            "seconds": round(line.seconds, 4),
        }
        disk.append(self._path, (json.dumps(values) + "\n").encode())

    def close(self) -> None:
        """Do nothing: `write` closes the file after every line."""


@register_sink("tensorboard")
class TensorBoardSink:
    """TensorBoard events in tensorboard/, one point of `<stage>/<kind>/<metric>` for each metric and step."""

    def __init__(self, output_dir: Path):
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_EVENT_FILES)}"
        self._path = output_dir / "tensorboard" / name
        self._path.parent.mkdir(exist_ok=True)
        self._append(file_version="brain.Event:2")

    def begin_stage(self, stage: str, start: int) -> None:
        """Do nothing: TensorBoard shows the newest point of a step."""

    def write(self, line: MetricLine) -> None:
        """Write one event with a point for each metric of the line."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        points = [
            Summary.Value(tag=f"{line.stage}/{line.kind}/{name}", simple_value=value)
            for name, value in line.metrics.items()
        ]
        self._append(step=line.step, summary=Summary(value=points))

    def close(self) -> None:
        """Do nothing: `write` closes the file after every event."""

    def _append(self, **values: object) -> None:
        # TensorBoard's own writer has a thread, which ends for good if the disk is full.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **values).SerializeToString())
        disk.append(self._path, record.getvalue())


class QueuedSink:
    """A metric sink that passes lines to another sink in a thread, through a queue of at most `max_lines` lines.

    The other sink is opened and called in that thread only, so a service that blocks or fails neither stops nor slows a
    run. Lines that do not fit into the queue, and lines for which the sink raises an error, are dropped and counted. A
    warning reports the first of them, and a warning at the end reports their number.
    """

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], MetricSink],
        max_lines: int = _MAX_LINES,
        close_seconds: float = CLOSE_SECONDS,
        retry_seconds: float = _RETRY_SECONDS,
    ):
        """Start the thread.

        Args:
            name: The name of the sink in messages.
            open_sink: Opens the sink. If this fails, it is tried again every `retry_seconds`.
            max_lines: The most lines that wait.
            close_seconds: The longest that `close` waits.
            retry_seconds: The time between attempts to open the sink.
        """
        self._name, self._open, self._max_lines = name, open_sink, max_lines
        self._close_seconds, self._retry_seconds = close_seconds, retry_seconds
        self._changed = threading.Condition()
        self._waiting: deque[MetricLine | tuple[str, int]] = deque()  # lines, and (stage, start) when a stage begins
        self._num_waiting = self._num_received = self._num_written = 0  # lines
        self._is_closing = self._has_closed = self._has_failed = self._has_warned = False
        self._closes_until = 0.0
        self._thread = threading.Thread(target=self._run, name=f"metric sink {name}", daemon=True)
        self._thread.start()

    def begin_stage(self, stage: str, start: int) -> None:
        """Let the sink begin a stage after it has written the waiting lines."""
        with self._changed:
            self._waiting.append((stage, start))
            self._changed.notify()

    def write(self, line: MetricLine) -> None:
        """Add a line to the queue, or drop it if the queue is full."""
        with self._changed:
            self._num_received += 1
            is_full = self._num_waiting >= self._max_lines
            if not is_full and not self._is_closing:
                self._waiting.append(line)
                self._num_waiting += 1
                self._changed.notify()
        if is_full:
            self._warn(f"does not keep up with the run, and {self._max_lines} lines wait")

    def begin_to_close(self, has_failed: bool = False) -> None:
        """Ask the sink to write the waiting lines and then close, and return at once.

        If the run has failed, a `FailingSink` is marked as failed before it is closed.
        """
        with self._changed:
            if not self._is_closing:
                self._is_closing, self._has_failed = True, has_failed
                self._closes_until = time.monotonic() + self._close_seconds
                self._changed.notify()

    def close(self) -> None:
        """Wait for a limited time until the sink has closed, and warn if the sink lacks lines."""
        self.begin_to_close()
        if self._has_closed:
            return
        self._has_closed = True
        self._thread.join(max(0.0, self._closes_until - time.monotonic()))
        with self._changed:
            missing = self._num_received - self._num_written
        if self._thread.is_alive():
            log.LOGGER.warning(
                "metric sink %s did not finish within %g s, and was abandoned; %d of %d lines may be missing in it",
                self._name, self._close_seconds, missing, self._num_received,
            )  # fmt: skip
        elif missing:
            log.LOGGER.warning("metric sink %s lacks %d of %d lines", self._name, missing, self._num_received)

    def _run(self) -> None:
        sink = self._open_or_retry()
        if sink is None:
            return
        while (entry := self._take_next()) is not None:
            try:
                if isinstance(entry, MetricLine):
                    sink.write(entry)
                else:
                    sink.begin_stage(*entry)
            except Exception as error:  # a library may raise any error, which must not end the run
                if not self._has_warned:
                    self._warn(describe_error(error))
            else:
                with self._changed:
                    self._num_written += isinstance(entry, MetricLine)
        try:
            if self._has_failed and isinstance(sink, FailingSink):
                sink.fail()
            sink.close()
        except Exception as error:  # a library may raise any error
            log.LOGGER.warning(
                "metric sink %s failed when it was closed: %s", self._name, log.make_printable(describe_error(error))
            )

    def _open_or_retry(self) -> MetricSink | None:
        """Return the sink, or None if the run ends before the sink could be opened."""
        while True:
            try:
                return self._open()
            except Exception as error:  # a library may raise any error
                self._warn(
                    f"cannot be opened, and is tried again every {self._retry_seconds:g} s: {describe_error(error)}"
                )
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closing, self._retry_seconds):
                    return None

    def _take_next(self) -> MetricLine | tuple[str, int] | None:
        """Wait for the next entry and return it; return None when the sink closes and the queue is empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if not self._waiting:
                return None
            entry = self._waiting.popleft()
            self._num_waiting -= isinstance(entry, MetricLine)
            return entry

    def _warn(self, reason: str) -> None:
        """Warn of the first problem only."""
        if not self._has_warned:
            self._has_warned = True
            log.LOGGER.warning(
                "metric sink %s %s; the run continues, lines that the sink does not get are dropped, and their number "
                "is reported at the end (metrics.jsonl has them all)",
                self._name, log.make_printable(reason),
            )  # fmt: skip

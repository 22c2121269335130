"""Write the metrics of a run somewhere: one sink for each kind of file or service."""

from __future__ import annotations

import io
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl_megatron import disk
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.metrics import METRICS_FILE
from rl_megatron.observability.recorded_metrics import readable_lines


@dataclass(frozen=True)
class MetricLine:
    """The metrics of one training step or one evaluation.

    Attributes:
        stage: The name of the run's stage.
        step: The training step, 1 for the first; an evaluation before it has step 0.
        kind: "train" or "eval".
        metrics: The values by name (see `config.metrics`).
        seconds: The wall-clock time since the line before, or since the stage began.
    """

    stage: str
    step: int
    kind: str
    metrics: dict[str, float]
    seconds: float


class MetricSink(Protocol):
    """A place that metrics are written to. Only rank 0 has sinks."""

    def begin_stage(self, stage: str, start: int) -> None:
        """Prepare for the steps of a stage after step `start`.

        An interrupted run may have written lines of later steps, which now come again.
        """
        ...

    def write(self, line: MetricLine) -> None:
        """Write one line. The run may be killed at any time afterwards.

        Raises:
            OSError: The disk is full (ENOSPC), and nothing of the line was written. The line is given again later.
        """
        ...

    def close(self) -> None:
        """Finish writing. Nothing is written afterwards."""
        ...


_EVENT_FILES = itertools.count()  # each writer of a process has a file of its own
# What makes a sink, from the run's output directory.
SINKS: Registry[Callable[[Path], MetricSink]] = Registry("metric sink")
register_sink = SINKS.register


def check_sinks(names: Sequence[str]) -> None:
    """Refuse unknown metric sinks, and a run without metrics.jsonl, which curves.png and a resumed run read.

    Raises:
        ConfigError: A sink is unknown, or jsonl is missing.
    """
    for name in names:
        if name not in SINKS:
            raise ConfigError(f"metric_sinks: there is no metric sink {name!r}{nearest(name, SINKS)}")
    if "jsonl" not in names:
        raise ConfigError(f"metric_sinks={list(names)}: curves.png is drawn from jsonl's file; add jsonl")


@register_sink("jsonl")
class JsonlSink:
    """The file metrics.jsonl, one JSON object a line, numbers with every digit."""

    def __init__(self, output_dir: Path):
        self._path = output_dir / METRICS_FILE

    def begin_stage(self, stage: str, start: int) -> None:
        """Drop the lines of this stage after step `start`, and those that cannot be read."""
        drop_later_lines(self._path, stage, start)

    def write(self, line: MetricLine) -> None:
        """Append the line to the file."""
        written = {
            "stage": line.stage,
            "step": line.step,
            "kind": line.kind,
            **line.metrics,
            "seconds": round(line.seconds, 4),
        }
        disk.append(self._path, (json.dumps(written) + "\n").encode())

    def close(self) -> None:
        """Do nothing: every line was closed when it was written."""


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
        """Do nothing: every event was closed when it was written."""

    def _append(self, **values: Any) -> None:
        # TensorBoard's own writer has a thread, which ends for good if the disk is full.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **values).SerializeToString())
        disk.append(self._path, record.getvalue())


def drop_later_lines(path: Path, stage: str, start: int) -> None:
    """Drop the lines of a stage after step `start` from a file of JSON lines, and those that cannot be read."""
    if not path.exists():
        return
    kept = [line for line in readable_lines(path) if not _is_after(line, stage, start)]
    disk.replace_file(path, "".join(json.dumps(line) + "\n" for line in kept))


def _is_after(line: dict[str, Any], stage: str, step: int) -> bool:
    return line["stage"] == stage and (line["step"] > step or (step == 0 and line["step"] == 0))

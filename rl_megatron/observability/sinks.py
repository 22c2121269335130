"""Write the metrics of a run somewhere: one sink for each kind of file or service."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.metrics import METRICS_FILE
from rl_megatron.config.registry import Registry
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
        """Write one line. The run may be killed at any time afterwards."""
        ...

    def close(self) -> None:
        """Finish writing. Nothing is written afterwards."""
        ...


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
        with self._path.open("a") as file:
            file.write(json.dumps(written) + "\n")

    def close(self) -> None:
        """Do nothing: every line was closed when it was written."""


@register_sink("tensorboard")
class TensorBoardSink:
    """TensorBoard events in tensorboard/, one point of `<stage>/<kind>/<metric>` for each metric and step."""

    def __init__(self, output_dir: Path):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        self._writer = SummaryWriter(str(output_dir / "tensorboard"))

    def begin_stage(self, stage: str, start: int) -> None:
        """Do nothing: TensorBoard shows the newest point of a step."""

    def write(self, line: MetricLine) -> None:
        """Write one event with a point for each metric of the line, which takes a tenth of the time of many."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        points = [
            Summary.Value(tag=f"{line.stage}/{line.kind}/{name}", simple_value=value)
            for name, value in line.metrics.items()
        ]
        self._writer._get_file_writer().add_summary(Summary(value=points), line.step)

    def close(self) -> None:
        """Write what is buffered, and close the file."""
        self._writer.close()


def drop_later_lines(path: Path, stage: str, start: int) -> None:
    """Drop the lines of a stage after step `start` from a file of JSON lines, and those that cannot be read."""
    if not path.exists():
        return
    kept = [line for line in readable_lines(path) if not _is_after(line, stage, start)]
    rewritten = path.with_suffix(".rewritten")
    rewritten.write_text("".join(json.dumps(line) + "\n" for line in kept))
    rewritten.replace(path)  # atomic, because the run may be killed here as well


def _is_after(line: dict[str, Any], stage: str, step: int) -> bool:
    return line["stage"] == stage and (line["step"] > step or (step == 0 and line["step"] == 0))

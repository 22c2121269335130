"""Log the metrics of a run: to its sinks, on the console, and at the end in a report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rl_megatron import disk, log
from rl_megatron.config.loggers import PrometheusConfig
from rl_megatron.config.metrics import METRICS_FILE, SAMPLES
from rl_megatron.observability.html_report import REPORT, ReportPages, warn_if_it_fails, write_html_report
from rl_megatron.observability.progress import ConsoleProgress
from rl_megatron.observability.recorded_metrics import drop_later_lines
from rl_megatron.observability.report import write_report
from rl_megatron.observability.service_sinks import PrometheusSink
from rl_megatron.observability.sinks import SINKS, MetricLine, MetricSink, QueuedSink


class MetricsLogger:
    """The logger of a run's metrics, which writes each line of metrics to every sink and to the console.

    It owns the sinks and the display. Only rank 0 writes: on other ranks `enabled` is False, and methods do nothing.
    """

    def __init__(
        self,
        output_dir: Path,
        enabled: bool,
        sinks: Sequence[str] = ("jsonl", "tensorboard"),
        services: Mapping[str, Callable[[], MetricSink]] | None = None,
        prometheus: PrometheusConfig | None = None,
    ):
        """Open the sinks.

        Args:
            output_dir: The run's directory.
            enabled: Whether this rank writes.
            sinks: Names of registered sinks (`sinks.register_sink`).
            services: For each service's name, the function that opens its sink (`service_sinks.prepare_service_sinks`).
                Each sink has a thread and a queue.
            prometheus: The settings of the endpoint for Prometheus, or None for no endpoint.
        """
        self.output_dir, self.enabled = output_dir, enabled
        self._console = Console(quiet=not enabled, soft_wrap=True)  # users copy paths, so lines are not broken
        self._progress = ConsoleProgress(self._console)
        self._sinks: list[MetricSink] = [SINKS[name](output_dir) for name in sinks] if enabled else []
        if enabled:
            self._sinks += [QueuedSink(name, open_sink) for name, open_sink in (services or {}).items()]
            if prometheus is not None:
                self._sinks.append(PrometheusSink(prometheus, output_dir))
        self._pages = ReportPages(output_dir)
        self._writes = disk.WaitingWrites(output_dir)
        self._noted: dict[str, float] = {}
        self._stage, self._last = "", time.perf_counter()

    def begin_stage(self, stage: str, start: int, steps: int, metric: str = "loss") -> None:
        """Begin a stage of `steps` steps, of which `start` are done, and drop its recorded lines of later steps.

        The display always shows `metric`.
        """
        self._stage, self._last = stage, time.perf_counter()
        if not self.enabled:
            return
        for sink in self._sinks:
            self._writes.write(str(id(sink)), partial(sink.begin_stage, stage, start))
        self._writes.write(SAMPLES, partial(drop_later_lines, self.output_dir / SAMPLES, stage, start))
        self._progress.begin_stage(stage, start, steps, metric)

    def has_steps(self, stage: str) -> bool:
        """Return whether an earlier start of the run has recorded training steps of a stage; False on other ranks."""
        file = self.output_dir / METRICS_FILE
        if not (self.enabled and file.exists()):
            return False
        begin = f'{{"stage": {json.dumps(stage)}, '
        with file.open() as lines:
            return any(line.startswith(begin) and '"kind": "train"' in line for line in lines)

    def end_stage(self) -> None:
        """End the display of the stage."""
        if self.enabled:
            self._progress.end_stage()

    def show_phase(self, phase: str | None) -> None:
        """Show the phase of the training loop that runs (`timing.PhaseTimer`); None means that no phase runs."""
        if not self.enabled:
            return
        self._progress.show_phase(phase)
        for sink in self._sinks:
            if isinstance(sink, PrometheusSink):
                sink.enter_phase(phase)

    def note(self, metrics: dict[str, float]) -> None:
        """Keep metrics of a part of a step until `record` writes them with the next line."""
        self._noted |= metrics

    def record(self, step: int, metrics: dict[str, float], kind: str = "train") -> None:
        """Write a line of `kind` "train" or "eval", with `metrics` and those noted since the previous line."""
        metrics, self._noted = metrics | self._noted, {}
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if not self.enabled:
            return
        line = MetricLine(self._stage, step, kind, metrics, seconds)
        for sink in self._sinks:
            self._writes.write(str(id(sink)), partial(sink.write, line))
        self._progress.show(step, metrics, kind)
        self._pages.renew()

    def record_samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        """Add completions of an evaluation to samples.jsonl, for people to read."""
        if self.enabled and samples:
            line = {"stage": self._stage, "step": step, "kind": "eval", "samples": samples}
            content = (json.dumps(line) + "\n").encode()
            self._writes.write(SAMPLES, partial(disk.append, self.output_dir / SAMPLES, content))

    def finish_writing(self) -> None:
        """Write the lines that wait for space on a full disk. Raise OSError if the disk is still full."""
        self._writes.finish()

    def close(self, has_failed: bool = False) -> None:
        """Close the sinks, and wait at most `sinks.CLOSE_SECONDS` for all services together.

        Services show whether the run has failed. An error of a sink is logged as a warning, because an exception would
        hide why the run ended.
        """
        try:
            self._writes.finish()
        except Exception as error:
            log.LOGGER.warning(
                "%s: the last lines of metrics are not written (%s); their steps are repeated when the run continues",
                *(self.output_dir, disk.describe(error, self.output_dir)),
            )
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            if isinstance(sink, QueuedSink):
                sink.begin_to_close(has_failed)
        for sink in sinks:
            try:
                sink.close()
            except Exception as error:  # a sink may be the user's code and raise anything
                log.LOGGER.warning("metric sink %s failed when it was closed: %s", type(sink).__name__, error)
        self._pages.end()

    def finish(
        self, summary: dict[str, Any], next_commands: Sequence[tuple[str, str]] = (), has_trained: bool = True
    ) -> None:
        """Close the sinks and write the run's report, with the curves of metrics.jsonl.

        Args:
            summary: The content of summary.json; `stages`, `seconds` and `layout` are printed too.
            next_commands: What a user can do next: pairs of a description and a command to copy.
            has_trained: Whether any stage was trained. If not, an existing summary.json and curves.png are kept.
        """
        if not self.enabled:
            return
        self.close()
        write_report(self.output_dir, summary, self._console, next_commands, has_trained)
        warn_if_it_fails(REPORT, lambda: write_html_report(self.output_dir))

"""What a run leaves behind and shows: metrics.jsonl, TensorBoard events, a progress bar, curves, a summary.

Only rank 0 writes and shows; on other ranks every method does nothing.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_HELDOUT = ("accuracy", "nll_per_token", "nll_per_character", "preference_accuracy", "reward_accuracy")
_SHOWN = ("loss", "reward", *_HELDOUT, "grad_norm", "lr")
_LINES_PER_STAGE = 20  # of plain progress where there is no terminal


class Recorder:
    """Metrics of one run, in `output_dir`."""

    def __init__(self, output_dir: Path, enabled: bool):
        self.output_dir, self.enabled = output_dir, enabled
        self.console = Console(quiet=not enabled)
        self._progress: Progress | None = None
        self._noted: dict[str, float] = {}
        if enabled:
            from torch.utils.tensorboard import SummaryWriter

            self._metrics = output_dir / "metrics.jsonl"
            self._tensorboard = SummaryWriter(str(output_dir / "tensorboard"))

    def begin_stage(self, stage: str, start: int, steps: int) -> None:
        """Starts the display of a stage at step `start`; forgets later steps, which an interrupted run recorded."""
        self._stage, self._steps, self._last = stage, steps, time.perf_counter()
        if not self.enabled:
            return
        self._forget_after(stage, start)
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[shown]}"),
                console=self.console,
            )
            self._bar = self._progress.add_task(stage, total=steps, completed=start, shown="")
            self._progress.start()

    def end_stage(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def note(self, figures: dict[str, float]) -> None:
        """Keeps figures of what happens within a step for the next line that is recorded."""
        self._noted |= figures

    def record(self, step: int, metrics: dict[str, float], kind: str = "train") -> None:
        """One line of metrics.jsonl, one TensorBoard point per metric, and the progress display."""
        metrics, self._noted = metrics | self._noted, {}
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if not self.enabled:
            return
        line = {"stage": self._stage, "step": step, "kind": kind, **metrics, "seconds": round(seconds, 4)}
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in metrics.items():
            self._tensorboard.add_scalar(f"{self._stage}/{kind}/{name}", value, step)
        self._show(step, metrics, kind)

    def _show(self, step: int, metrics: dict[str, float], kind: str) -> None:
        shown = "  ".join(f"{name} {metrics[name]:.4g}" for name in _SHOWN if name in metrics)
        if kind == "eval":
            self.console.print(f"{self._stage} step {step}: held-out {shown}", highlight=False)
        elif self._progress is not None:
            self._progress.update(self._bar, completed=step, shown=shown)
        elif step % max(1, self._steps // _LINES_PER_STAGE) == 0:
            self.console.print(f"{self._stage} step {step}/{self._steps}: {shown}", highlight=False)

    def _forget_after(self, stage: str, step: int) -> None:
        if self._metrics.exists():
            lines = [line for line in self._metrics.read_text().splitlines() if line.endswith("}")]
            kept = [line for line in lines if not _is_after(json.loads(line), stage, step)]
            rewritten = self._metrics.with_suffix(".rewritten")
            rewritten.write_text("".join(line + "\n" for line in kept))
            rewritten.replace(self._metrics)  # whole or not at all: the run may be killed here as well

    def finish(self, summary: dict[str, Any]) -> None:
        """Writes summary.json and curves.png and prints the table of results."""
        if not self.enabled:
            return
        self._tensorboard.close()
        plot_curves(self._metrics, self.output_dir / "curves.png")
        (self.output_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        names = sorted({name for result in summary["stages"].values() for name in result})
        table = Table(title="Held-out results after each stage")
        table.add_column("stage")
        for name in names:
            table.add_column(name, justify="right")
        for stage, result in summary["stages"].items():
            table.add_row(stage, *(f"{result[name]:.4f}" if name in result else "" for name in names))
        self.console.print(table)
        self.console.print(
            f"{summary['seconds']:.0f} s on {summary['layout']}; written to {self.output_dir}", highlight=False
        )


def _is_after(line: dict[str, Any], stage: str, step: int) -> bool:
    return line["stage"] == stage and (line["step"] > step or (step == 0 and line["step"] == 0))


def plot_curves(metrics: Path, picture: Path) -> None:
    """Loss, held-out measures and reward of every stage against the step, one column a stage, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    figure, axes = pyplot.subplots(2, len(stages), figsize=(4.5 * len(stages), 6), squeeze=False)
    for column, stage in enumerate(stages):
        mine = [line for line in lines if line["stage"] == stage]
        _plot(axes[0][column], mine, "train", ("loss",), f"{stage}: loss")
        _plot(axes[1][column], mine, "train", ("reward",), f"{stage}: reward, held-out")
        _plot(axes[1][column], mine, "eval", _HELDOUT, None)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _plot(axis: Any, lines: list[dict[str, Any]], kind: str, names: tuple[str, ...], title: str | None) -> None:
    for name in names:
        points = [(line["step"], line[name]) for line in lines if line["kind"] == kind and name in line]
        if points:
            axis.plot(*zip(*points, strict=True), label=name, marker="o" if kind == "eval" else None, linewidth=1)
            axis.legend(fontsize=8)
    if "accuracy" in axis.get_legend_handles_labels()[1]:
        axis.set_ylim(0, 1)
    if title:
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)

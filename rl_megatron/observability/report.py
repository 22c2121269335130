"""Report a finished run: summary.json, curves.png, and a table on the console."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_megatron.observability.sinks import METRICS_FILE

# The evaluation metrics that the curves and the console show.
HELDOUT = ("accuracy", "nll_per_token", "nll_per_character", "preference_accuracy", "reward_accuracy")


def write_report(output_dir: Path, summary: dict[str, Any], console: Console) -> None:
    """Write curves.png and summary.json into `output_dir`, and print the results of each stage."""
    plot_curves(output_dir / METRICS_FILE, output_dir / "curves.png")
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    console.print(_results(summary["stages"]))
    console.print(f"{summary['seconds']:.0f} s on {summary['layout']}; written to {output_dir}", highlight=False)


def _results(stages: dict[str, dict[str, float]]) -> Table:
    """Return a table with a row for each stage and a column for each of its evaluation metrics."""
    names = sorted({name for result in stages.values() for name in result})
    table = Table(title="Held-out results after each stage")
    table.add_column("stage")
    for name in names:
        table.add_column(name, justify="right")
    for stage, result in stages.items():
        table.add_row(stage, *(f"{result[name]:.4f}" if name in result else "" for name in names))
    return table


def plot_curves(metrics: Path, picture: Path) -> None:
    """Plot loss, reward and evaluation metrics against the step, one column for each stage, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    figure, axes = pyplot.subplots(2, len(stages), figsize=(4.5 * len(stages), 6), squeeze=False)
    for column, stage in enumerate(stages):
        of_stage = [line for line in lines if line["stage"] == stage]
        _plot(axes[0][column], of_stage, "train", ("loss",), f"{stage}: loss")
        _plot(axes[1][column], of_stage, "train", ("reward",), f"{stage}: reward, held-out")
        _plot(axes[1][column], of_stage, "eval", HELDOUT, None)
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

"""Report a finished run: summary.json, curves.png, and a table on the console."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from rl_megatron import disk
from rl_megatron.config.metrics import METRICS_FILE, choose_shown_name, is_eval_metric
from rl_megatron.observability.html_report import warn_if_it_fails

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The evaluation metrics in curves.png.
_HELDOUT = ("accuracy", "nll_per_token", "nll_per_character", "preference_accuracy", "reward_accuracy")
_SHARES = {"accuracy", "reward", "preference_accuracy", "reward_accuracy"}  # if their values are in [0, 1]

_UNLIMITED = 10_000  # columns


def write_report(
    output_dir: Path,
    summary: dict[str, Any],
    console: Console,
    next_commands: Sequence[tuple[str, str]] = (),
    has_trained: bool = True,
) -> None:
    """Write curves.png and summary.json into `output_dir`, and print the results of each stage.

    Then print what a user can do next: each of `next_commands` is a description and, on its own line, a command. If
    nothing was trained and summary.json exists, neither file is changed.
    """
    is_written = has_trained or not (output_dir / "summary.json").is_file()
    if is_written:
        warn_if_it_fails("curves.png", lambda: plot_curves(output_dir / METRICS_FILE, output_dir / "curves.png"))
        content = json.dumps(summary, indent=1) + "\n"
        warn_if_it_fails("summary.json", lambda: disk.replace_file(output_dir / "summary.json", content))
    if summary["stages"]:
        console.print("Held-out results after each stage")
        console.print(_build_results(summary["stages"], console), soft_wrap=False)
    # Plain text, not wrapped even in a narrow terminal, because users copy it.
    lines = [f"{summary['seconds']:.0f} s on {summary['layout']}", f"Written to {output_dir}"]
    if not is_written:
        lines = [f"All stages were complete before, and nothing was trained: {output_dir} is unchanged"]
    if next_commands:
        lines += [
            "",
            "What you can do next:",
            *(line for text, command in next_commands for line in (f"  {text}", f"    {command}")),
        ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _build_results(stages: dict[str, dict[str, float]], console: Console) -> Table:
    """Return a table of each stage's evaluation metrics, without standard errors and changes.

    Metrics are columns and stages are lines, or the other way round if that is too wide for the console. If both are
    too wide, rich cuts cells.
    """
    names = sorted({name for result in stages.values() for name in result if "/" not in name or is_eval_metric(name)})
    columns = [["stage", *stages]]
    for name in names:
        values = [result[name] for result in stages.values() if name in result]
        columns.append(
            [choose_shown_name(name, values), *(_format_number(result.get(name)) for result in stages.values())]
        )
    table = _build_table(list(zip(*columns, strict=True)))
    unlimited = console.options.update(max_width=_UNLIMITED)
    if Measurement.get(console, unlimited, table).maximum <= console.width:
        return table
    return _build_table([("metric", *stages), *columns[1:]])


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:z.4f}"  # z: without the sign of −0


def _build_table(cells: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first row is its header, and whose cells are not wrapped."""
    table = Table()
    for index, name in enumerate(cells[0]):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for line in cells[1:]:
        table.add_row(*line)
    return table


def plot_curves(metrics: Path, picture: Path) -> None:
    """Plot loss, reward and evaluation metrics against the step, one column for each stage, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    if not lines:
        return  # the run ended before its first metrics
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    figure, axes = pyplot.subplots(2, len(stages), figsize=(4.5 * len(stages), 6), squeeze=False)
    for column, stage in enumerate(stages):
        stage_lines = [line for line in lines if line["stage"] == stage]
        _plot(axes[0][column], stage_lines, "train", ("loss",), f"{stage}: loss")
        _plot(axes[1][column], stage_lines, "train", ("reward",), f"{stage}: reward, held-out")
        _plot(axes[1][column], stage_lines, "eval", _HELDOUT, None)
        if _are_shares(axes[1][column]):
            axes[1][column].set_ylim(0, 1)
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, dpi=110, format="png")
    pyplot.close(figure)
    disk.replace_file(picture, content.getvalue())


def _plot(axis: Axes, lines: list[dict[str, Any]], kind: str, names: tuple[str, ...], title: str | None) -> None:
    for name in names:
        points = [(line["step"], line[name]) for line in lines if line["kind"] == kind and name in line]
        if points:
            label = choose_shown_name(name, (value for _, value in points))
            axis.plot(*zip(*points, strict=True), label=label, marker="o" if kind == "eval" else None, linewidth=1)
            axis.legend(fontsize=8)
    if title:
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)


def _are_shares(axis: Any) -> bool:
    """Return whether all curves on the axis are shares, such as accuracies, with values in [0, 1]."""
    curves = axis.get_lines()
    values = [value for curve in curves for value in curve.get_ydata()]
    return bool(curves) and {curve.get_label() for curve in curves} <= _SHARES and all(0 <= v <= 1 for v in values)

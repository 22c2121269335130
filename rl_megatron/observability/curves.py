"""Draw curves as SVG, for pages that need no other file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

Points = Sequence[tuple[int, float]]

_SIZE = (5.2, 2.7)  # inches
_COLOURS = (
    "#2c6fbb",
    "#d1622b",
    "#2f9e62",
    "#8a4fb5",
    "#b8436d",
    "#7a6a2f",
    "#3c8d9e",
    "#75757d",
    "#a0c02b",
    "#d8a62a",
)
_SMOOTHED_FROM = 20  # points: fewer are drawn as they are
_WINDOW_SHARE = 0.05  # of the points, over which a smooth curve averages


def line_chart(title: str, curves: Mapping[str, Points], *, logarithmic: bool = False) -> str:
    """Return an SVG of curves over steps. A long curve is drawn faintly, with a smoothed one above it.

    Args:
        title: The title.
        curves: (step, value) of each point of each curve, by label.
        logarithmic: Whether the axis of values is logarithmic, if all values are positive.
    """
    figure, axis = _figure(title)
    for number, (label, points) in enumerate(curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        steps, values = [step for step, _ in points], [value for _, value in points]
        is_long = len(points) >= _SMOOTHED_FROM
        axis.plot(
            steps, values, color=colour, linewidth=1.0, alpha=0.3 if is_long else 1.0,
            marker="o" if len(points) < _SMOOTHED_FROM else None, markersize=2.5, label=None if is_long else label,
        )  # fmt: skip
        if is_long:
            axis.plot(steps, smoothed(values), color=colour, linewidth=1.4, label=label)
    if logarithmic and all(value > 0 for points in curves.values() for _, value in points):
        axis.set_yscale("log")
    if len(curves) > 1 or title not in curves:
        axis.legend(fontsize=7, frameon=False)
    return _svg(figure)


def stacked_chart(title: str, parts: Mapping[str, Points]) -> str:
    """Return an SVG of parts that add up, over steps. A part without a value at a step is 0 there."""
    figure, axis = _figure(title)
    steps = sorted({step for points in parts.values() for step, _ in points})
    by_step = [dict(points) for points in parts.values()]
    heights = [[values.get(step, 0.0) for step in steps] for values in by_step]
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(parts))]
    if len(steps) == 1:  # an area has no width then
        bottom = 0.0
        for label, (height,), colour in zip(parts, heights, colours, strict=True):
            axis.bar(steps, [height], bottom=bottom, label=label, color=colour, width=0.4)
            bottom += height
    else:
        axis.stackplot(steps, heights, labels=list(parts), colors=colours, alpha=0.85)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _svg(figure)


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours, over a window of a twentieth of the values."""
    reach = max(1, round(len(values) * _WINDOW_SHARE / 2))
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    found = []
    for place in range(len(values)):
        first, end = max(0, place - reach), min(len(values), place + reach + 1)
        found.append((sums[end] - sums[first]) / (end - first))
    return found


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # not pyplot, which keeps every figure until it is closed
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=_SIZE, layout="constrained")
    axis = figure.subplots()
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel("step", fontsize=7)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axis.tick_params(which="both", labelsize=7)
    axis.yaxis.get_offset_text().set_fontsize(7)
    axis.grid(color="#8888881f")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure, axis


def _svg(figure: Any) -> str:
    """Return the figure as an element of an HTML page."""
    import matplotlib

    text, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rl_megatron"}):
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    svg = text.getvalue()
    return svg[svg.index("<svg") :]

"""Draw curves as SVG, for pages that need no other file.

matplotlib only finds the ticks, because drawing with it takes 0.1 s per chart, and a page has dozens of charts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Points = Sequence[tuple[int, float]]

_WIDTH, _HEIGHT = 416, 216  # the size of a chart, in pixels if it is 26 rem wide
_LEFT, _TOP, _BOTTOM = 58, 22, 34  # margins
_RIGHT, _RIGHT_OF_STACK = 10, 104  # a stacked chart has its legend on the right
_COLOURS = (
    "#2c6fbb", "#d1622b", "#2f9e62", "#8a4fb5", "#b8436d", "#7a6a2f", "#3c8d9e", "#75757d", "#a0c02b", "#d8a62a",
)  # fmt: skip
_MIN_SMOOTHED = 20  # points: a shorter curve is not smoothed
_WINDOW_SHARE = 0.05  # the window of a smoothed curve, as a share of its points


def draw_lines(title: str, curves: Mapping[str, Points], *, logarithmic: bool = False) -> str:
    """Return an SVG of labelled curves over steps. A long curve is drawn faintly, with a smoothed curve over it.

    If `logarithmic` and all values are positive, the axis of values is logarithmic.
    """
    values = [value for points in curves.values() for _, value in points]
    steps = [step for points in curves.values() for step, _ in points]
    chart = _Chart(title, steps, values, logarithmic and min(values) > 0, _RIGHT)
    for number, points in enumerate(curves.values()):
        colour = _COLOURS[number % len(_COLOURS)]
        is_long = len(points) >= _MIN_SMOOTHED
        chart.draw_curve(points, colour, 0.3 if is_long else 1.0)
        if is_long:
            means = smooth([value for _, value in points])
            chart.draw_curve([(step, value) for (step, _), value in zip(points, means, strict=True)], colour, 1.0)
        else:
            chart.draw_dots(points, colour)
    if len(curves) > 1 or title not in curves:
        chart.write_legend(list(curves), x=_WIDTH - _RIGHT - 4, at_end=True)
    return chart.to_svg()


def draw_stack(title: str, parts: Mapping[str, Points]) -> str:
    """Return an SVG of parts that add up, over steps. A part without a value at a step is 0 at this step."""
    steps = sorted({step for points in parts.values() for step, _ in points})
    by_step = [dict(points) for points in parts.values()]
    if len(steps) == 1:  # an area over one step would have no width
        steps = [steps[0], steps[0] + 1]
        by_step = [{step: next(iter(values.values()), 0.0) for step in steps} for values in by_step]
    totals = [sum(values.get(step, 0.0) for values in by_step) for step in steps]
    chart = _Chart(title, steps, [0.0, *totals], False, _RIGHT_OF_STACK, from_zero=True)
    below = [0.0] * len(steps)
    for number, values in enumerate(by_step):
        above = [low + values.get(step, 0.0) for low, step in zip(below, steps, strict=True)]
        chart.fill_area(steps, below, above, _COLOURS[number % len(_COLOURS)])
        below = above
    chart.write_legend(list(parts), x=_WIDTH - _RIGHT_OF_STACK + 8)
    return chart.to_svg()


def smooth(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours, over a window of a twentieth of the values."""
    reach = max(1, round(len(values) * _WINDOW_SHARE / 2))
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    means = []
    for index in range(len(values)):
        first, end = max(0, index - reach), min(len(values), index + reach + 1)
        means.append((sums[end] - sums[first]) / (end - first))
    return means


class _Chart:
    """One chart: axes with ticks, and what is drawn on them."""

    def __init__(
        self, title: str, steps: Sequence[int], values: Sequence[float], logarithmic: bool, right: int,
        from_zero: bool = False,
    ):  # fmt: skip
        self._elements = [_write_text(_LEFT, 13, title, size=11)]
        self._right = _WIDTH - right
        low, high = _widen(min(values), max(values), logarithmic, from_zero)
        first, last = (min(steps), max(steps)) if min(steps) < max(steps) else (min(steps) - 1, max(steps) + 1)
        self._x = _make_scale(first, last, _LEFT, self._right)
        scale = _make_scale(_to_axis(low, logarithmic), _to_axis(high, logarithmic), _HEIGHT - _BOTTOM, _TOP)
        self._y: Callable[[float], float] = lambda value: scale(_to_axis(value, logarithmic))
        for tick, label in _find_value_ticks(low, high, logarithmic):
            y = self._y(tick)
            self._draw_line(_LEFT, y, self._right, y, "#8888881f")
            self._elements.append(_write_text(_LEFT - 5, y + 3, label, anchor="end"))
        for tick in _find_step_ticks(first, last):
            x = self._x(tick)
            self._draw_line(x, _TOP, x, _HEIGHT - _BOTTOM, "#8888881f")
            self._elements.append(_write_text(x, _HEIGHT - _BOTTOM + 12, str(tick), anchor="middle"))
        self._draw_line(_LEFT, _TOP, _LEFT, _HEIGHT - _BOTTOM, "#333")
        self._draw_line(_LEFT, _HEIGHT - _BOTTOM, self._right, _HEIGHT - _BOTTOM, "#333")
        self._elements.append(_write_text((_LEFT + self._right) / 2, _HEIGHT - 6, "step", anchor="middle"))

    def draw_curve(self, points: Points, colour: str, opacity: float) -> None:
        """Draw lines between points."""
        path = "M" + "L".join(f"{self._x(step):.1f} {self._y(value):.1f}" for step, value in points)
        self._elements.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.4" stroke-opacity="{opacity}"/>'
        )

    def draw_dots(self, points: Points, colour: str) -> None:
        """Draw a dot at each point."""
        self._elements += [
            f'<circle cx="{self._x(step):.1f}" cy="{self._y(value):.1f}" r="2.6" fill="{colour}"/>'
            for step, value in points
        ]

    def fill_area(self, steps: Sequence[int], below: Sequence[float], above: Sequence[float], colour: str) -> None:
        """Fill the area between two curves."""
        outline = [*zip(steps, above, strict=True), *reversed(list(zip(steps, below, strict=True)))]
        path = "M" + "L".join(f"{self._x(step):.1f} {self._y(value):.1f}" for step, value in outline) + "Z"
        self._elements.append(f'<path d="{path}" fill="{colour}" fill-opacity="0.85"/>')

    def write_legend(self, labels: Sequence[str], x: float, at_end: bool = False) -> None:
        """Write labels in their colours, one below the other. A white edge keeps them readable over curves."""
        for number, label in enumerate(labels):
            colour, anchor = _COLOURS[number % len(_COLOURS)], "end" if at_end else "start"
            self._elements.append(
                _write_text(x, _TOP + 10 + 11 * number, label, anchor=anchor, colour=colour, edge=True)
            )

    def to_svg(self) -> str:
        """Return the SVG element."""
        return (
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg" '
            f'font-family="system-ui, sans-serif">{"".join(self._elements)}</svg>'
        )

    def _draw_line(self, x1: float, y1: float, x2: float, y2: float, colour: str) -> None:
        self._elements.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>')


def _write_text(
    x: float, y: float, text: str, size: int = 9, anchor: str = "start", colour: str = "#333", edge: bool = False
) -> str:
    attributes = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    if edge:
        attributes += ' paint-order="stroke" stroke="#fff" stroke-width="3" stroke-linejoin="round"'
    return f"<text {attributes}>{escape(text)}</text>"


def _to_axis(value: float, logarithmic: bool) -> float:
    return math.log10(value) if logarithmic else value


def _make_scale(first: float, last: float, begin: float, end: float) -> Callable[[float], float]:
    """Return the linear function that maps [first, last] to [begin, end]."""
    return lambda value: begin + (value - first) / (last - first) * (end - begin)


def _widen(low: float, high: float, logarithmic: bool, from_zero: bool) -> tuple[float, float]:
    """Return the limits, with a margin, of an axis for values from `low` to `high`."""
    if logarithmic:
        factor = max((high / low) ** 0.05, 1.05)
        return low / factor, high * factor
    margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return (0.0, high + margin) if from_zero else (low - margin, high + margin)


def _find_value_ticks(low: float, high: float, logarithmic: bool) -> list[tuple[float, str]]:
    """Return (value, label) of each tick of the value axis."""
    from matplotlib.ticker import MaxNLocator

    if logarithmic:
        powers = [10.0**exponent for exponent in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
        if len(powers) > 1:
            return [(power, f"{power:g}") for power in powers]
    ticks = [float(tick) for tick in MaxNLocator(nbins=6).tick_values(low, high) if low <= tick <= high]
    if len(ticks) < 2:
        return [(tick, f"{tick:.3g}") for tick in ticks]
    largest, spacing = max(map(abs, ticks)), ticks[1] - ticks[0]
    if 1e-4 <= largest < 1e6:
        decimals = next(number for number in range(20) if math.isclose(round(spacing, number), spacing, rel_tol=1e-6))
        return [(tick, f"{tick + 0.0:.{decimals}f}") for tick in ticks]
    digits = 2 + math.floor(math.log10(largest)) - math.floor(math.log10(spacing))
    return [(tick, f"{0.0 if abs(tick) < spacing / 1e6 else tick:.{digits}g}") for tick in ticks]


def _find_step_ticks(first: int, last: int) -> list[int]:
    from matplotlib.ticker import MaxNLocator

    ticks = MaxNLocator(nbins=8, integer=True).tick_values(first, last)
    return [round(tick) for tick in ticks if first <= tick <= last]

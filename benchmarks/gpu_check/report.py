"""Write the results of all parts as Markdown tables, and read them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.record import Range, holds_prediction

RESULTS, REPORT, FAILURES = "results.json", "report.md", "failures.txt"
_NO_FACTS: dict[str, Any] = {"facts": {}}


def read_results(directory: Path, name: str = RESULTS) -> dict[str, Any]:
    """Return what the results file of a directory has, also of earlier calls. Parts are in their order."""
    path = directory / name
    results = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    results["parts"] = {name: results["parts"][name] for name in PARTS if name in results["parts"]}
    return results


def write_report(output: Path) -> str:
    """Write the report of the results in a directory in one piece, and return its text."""
    text, temporary = markdown(read_results(output)), output / f".{REPORT}.{os.getpid()}"
    temporary.write_text(text)
    os.replace(temporary, output / REPORT)
    return text


def markdown(results: dict[str, Any]) -> str:
    """Return the tables of parts, figures, failures and of what was not measured; those without a line are left out."""
    parts = results["parts"]
    tables = [
        _table(("part", "result", "seconds", "checks that hold"), map(_part_line, parts, parts.values())),
        _table(("part", "failed check", "value", "had to be"), _failure_lines(parts)),
        _table(("part", "figure", "value", "spread", "predicted", "goal"), _figure_lines(parts)),
        _table(("part", "further", ""), _fact_lines(parts)),
        _table(("part", "not measured", "why"), _missing_lines(parts)),
    ]
    cards = ", ".join(dict.fromkeys(part["card"] for part in parts.values() if part.get("card")))
    facts = {"card": cards} | parts.get("environment", _NO_FACTS)["facts"] | results.get("about", {})
    heading = "; ".join(f"{name}: {text}" for name, text in facts.items() if text)
    return "\n\n".join(filter(None, [heading, *tables])) + "\n"


def _table(names: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    lines = [tuple(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines]
    if not lines:
        return ""
    rule = ["---:" if name in ("seconds", "value", "spread", "predicted") else "---" for name in names]
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, rule, *lines))


def _part_line(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    holds = sum(check["holds"] for check in part["checks"])
    tiny = ", tiny shapes" if part.get("tiny") else ""
    return name, f"{part['status']}{tiny}", f"{part['seconds']:.0f}", f"{holds} of {len(part['checks'])}"


def _figure_lines(parts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, part in parts.items():
        yield from ((name, figure["name"], *figure_cells(figure)) for figure in part["figures"])


def figure_cells(figure: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return a figure's value, spread, prediction and goal as text."""
    value, prediction = f"{shown(figure['value'])} {figure['unit']}".strip(), shown_range(figure.get("prediction"))
    if prediction and not is_as_predicted(figure):
        prediction += " (wrong)"
    return value, shown_range(figure.get("spread")), prediction, figure["goal"]


def is_as_predicted(figure: dict[str, Any]) -> bool:
    """Return whether a figure has no prediction, or one that holds."""
    prediction = figure.get("prediction")
    return prediction is None or holds_prediction(float(figure["value"]), prediction)


def _fact_lines(parts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, part in parts.items():
        if name != "environment":  # its facts are the heading
            yield from ((name, what, text) for what, text in part["facts"].items())


def _failure_lines(parts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, part in parts.items():
        for check in part["checks"]:
            if not check["holds"]:
                place = f", at {check['place']}" if check["place"] else ""
                yield name, check["name"] + place, shown(check["value"]), check["limit"]
        if part["error"]:
            yield name, "the part ended early", part["error"].strip().splitlines()[-1], ""


def _missing_lines(parts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for name, part in parts.items():
        if part["skipped"]:
            yield name, "the part", part["skipped"]
        yield from ((name, what, why) for what, why in part["not_measured"].items())


def shown_range(value: Range | str | None) -> str:
    """Return a number, or two as a range, or nothing."""
    if value is None:
        return ""
    return " to ".join(map(shown, value)) if isinstance(value, (tuple, list)) else shown(value)


def shown(value: float | str) -> str:
    """Return a number with the digits that matter."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"

"""Write the results of all parts as Markdown tables, which docs/performance.md can take as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.gpu_check.runner import read_results

REPORT = "report.md"
_NO_FACTS: dict[str, Any] = {"facts": {}}


def write_report(output: Path) -> str:
    """Write the report of the results in a directory, and return its text."""
    text = markdown(read_results(output)["parts"])
    (output / REPORT).write_text(text)
    return text


def markdown(parts: dict[str, dict[str, Any]]) -> str:
    """Return the tables of parts, figures, failures and of what was not measured; those without a line are left out."""
    tables = [
        _table(("part", "result", "seconds", "checks that hold"), map(_part_line, parts, parts.values())),
        _table(("part", "figure", "value", "goal"), _figure_lines(parts)),
        _table(("part", "failed check", "value", "had to be"), _failure_lines(parts)),
        _table(("part", "further", ""), _fact_lines(parts)),
        _table(("part", "not measured", "why"), _missing_lines(parts)),
    ]
    heading = "; ".join(f"{name}: {text}" for name, text in parts.get("environment", _NO_FACTS)["facts"].items())
    return "\n\n".join(filter(None, [heading, *tables])) + "\n"


def _table(names: tuple[str, ...], lines: Any) -> str:
    lines = [tuple(str(cell).replace("|", "\\|") for cell in line) for line in lines]
    if not lines:
        return ""
    rule = ["---:" if name in ("seconds", "value") else "---" for name in names]
    return "\n".join("| " + " | ".join(line) + " |" for line in (names, rule, *lines))


def _part_line(name: str, part: dict[str, Any]) -> tuple[str, ...]:
    holds = sum(check["holds"] for check in part["checks"])
    tiny = ", tiny shapes" if part.get("tiny") else ""
    return name, f"{part['status']}{tiny}", f"{part['seconds']:.0f}", f"{holds} of {len(part['checks'])}"


def _figure_lines(parts: dict[str, dict[str, Any]]):
    for name, part in parts.items():
        for figure in part["figures"]:
            yield name, figure["name"], f"{shown(figure['value'])} {figure['unit']}".strip(), figure["goal"]


def _fact_lines(parts: dict[str, dict[str, Any]]):
    for name, part in parts.items():
        if name != "environment":  # its facts are the heading
            yield from ((name, what, text) for what, text in part["facts"].items())


def _failure_lines(parts: dict[str, dict[str, Any]]):
    for name, part in parts.items():
        for check in part["checks"]:
            if not check["holds"]:
                place = f", at {check['place']}" if check["place"] else ""
                yield name, check["name"] + place, shown(check["value"]), check["limit"]
        if part["error"]:
            yield name, "the part ended early", part["error"].splitlines()[-1], ""


def _missing_lines(parts: dict[str, dict[str, Any]]):
    for name, part in parts.items():
        if part["skipped"]:
            yield name, "the part", part["skipped"]
        yield from ((name, what, why) for what, why in part["not_measured"].items())


def shown(value: float | str) -> str:
    """Return a number with the digits that matter."""
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"

"""The findings of `rl-megatron doctor` with their remedies, and the functions that print them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

State = Literal["ok", "warning", "problem"]
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Finding:
    """The result of one check, which is a line of the report.

    Attributes:
        check: The check's name, such as "ports".
        state: "problem" if a run would fail or give wrong results, "warning" if it would be slow or is untested.
        remedy: What to do; empty if there is nothing to do.
        host: The node, if several were checked.
    """

    check: str
    state: State
    message: str
    remedy: str = ""
    host: str = ""


@dataclass(frozen=True)
class Transfer:
    """An all-reduce of one size over all ranks.

    Attributes:
        size: The bytes of each rank's message.
        seconds: The mean time.
        bandwidth: The bytes per second that each rank sends, and also receives (the bus bandwidth).
    """

    size: int
    seconds: float
    bandwidth: float


def ok(check: str, message: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    """Return the finding that something is slow or untested, although a run works."""
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """Return the finding that something makes a run fail or give wrong results."""
    return Finding(check, "problem", message, remedy)


def refusal(check: str, error: Exception) -> Finding:
    """Return the problem that a `ConfigError` describes; the remedy is the text after its last semicolon."""
    message, _, remedy = str(error).rpartition("; ")
    return problem(check, message, remedy) if message else problem(check, remedy, "")


def count_state(findings: Sequence[Finding], state: State) -> int:
    """Return how many findings have a state."""
    return sum(finding.state == state for finding in findings)


def print_report(findings: Sequence[Finding], transfers: Sequence[Transfer], console: Console) -> None:
    """Print each finding with its remedy below, then a table of transfers, and the numbers of problems and warnings."""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        name = f"{finding.check} ({finding.host})" if finding.host else finding.check
        text = escape(finding.message) + (f"\n→ {escape(finding.remedy)}" if finding.remedy else "")
        table.add_row(f"[{_STYLES[finding.state]}]{finding.state}[/]", name, text)
    console.print(table)
    if transfers:
        speeds = Table("message", "time", "bandwidth", title="all-reduce over all ranks", title_justify="left")
        for transfer in transfers:
            size, seconds = f"{transfer.size:,} B", f"{transfer.seconds * 1e6:,.0f} µs"
            speeds.add_row(size, seconds, f"{transfer.bandwidth / 1e9:,.3f} GB/s")
        console.print(speeds)
    console.print(summarize(findings))


def summarize(findings: Sequence[Finding]) -> str:
    """Return how many problems and warnings there are."""
    problems, warnings = count_state(findings, "problem"), count_state(findings, "warning")
    return f"{problems} problem(s), {warnings} warning(s) in {len(findings)} checks"


def print_json(findings: Sequence[Finding], transfers: Sequence[Transfer]) -> None:
    """Print everything as one JSON object."""
    report = {
        "problems": count_state(findings, "problem"),
        "warnings": count_state(findings, "warning"),
        "checks": [asdict(finding) for finding in findings],
        "communication": [
            {"bytes": transfer.size, "seconds": transfer.seconds, "bytes_per_second": transfer.bandwidth}
            for transfer in transfers
        ],
    }
    print(json.dumps(report, indent=1), flush=True)

"""Print the findings of `rl-megatron doctor`, as tables or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_megatron.doctor.findings import Finding, count

if TYPE_CHECKING:
    from rl_megatron.doctor.communication import Transfer

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def print_report(findings: Sequence[Finding], transfers: Sequence[Transfer], console: Console) -> None:
    """Print a line for each finding, with its remedy below, a table of transfers, and the sum."""
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
    console.print(summary(findings))


def summary(findings: Sequence[Finding]) -> str:
    """Return how many problems and warnings there are."""
    problems, warnings = count(findings, "problem"), count(findings, "warning")
    return f"{problems} problem(s), {warnings} warning(s) in {len(findings)} checks"


def print_json(findings: Sequence[Finding], transfers: Sequence[Transfer]) -> None:
    """Print everything as one JSON object."""
    answer = {
        "problems": count(findings, "problem"),
        "warnings": count(findings, "warning"),
        "checks": [finding.as_json() for finding in findings],
        "communication": [
            {"bytes": each.size, "seconds": each.seconds, "bytes_per_second": each.bandwidth} for each in transfers
        ],
    }
    print(json.dumps(answer, indent=1), flush=True)

"""Parse the command line, and print the table. The package's docstring says what is compared."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import benchmarks.plan_against_measured
from benchmarks.plan_against_measured import ranks
from benchmarks.plan_against_measured.cases import CASES, Case
from benchmarks.plan_against_measured.memory import OfRank

TOLERANCE = 0.05
_MIB = 2**20
_WIDTH_IN_FILES = 140


@dataclass(frozen=True)
class Row:
    """A phase of a rank.

    Attributes:
        case: The name of the case.
        phase: The phase.
        rank: The rank.
        before: Measured bytes when the phase begins.
        predicted: Predicted bytes at the peak.
        measured: Measured bytes at the peak.
        ratio: predicted / measured.
        ratio_of_phase: The same of what the phase adds to what was there before it.
        static_is_equal: Whether parameters, gradients and optimizer state are equal to the byte.
    """

    case: str
    phase: str
    rank: int
    before: int
    predicted: int
    measured: int
    ratio: float
    ratio_of_phase: float
    static_is_equal: bool

    @property
    def is_good(self) -> bool:
        """Return whether the row meets the goal."""
        return abs(self.ratio - 1) <= TOLERANCE and self.static_is_equal


def rows_of(case: Case, predicted: Sequence[OfRank], measured: Sequence[OfRank]) -> list[Row]:
    """Return the rows of all phases and ranks of a case."""
    rows = []
    for phase in case.phases:
        for rank, (plan, real) in enumerate(zip(predicted, measured, strict=True)):
            ours, theirs = plan.phases[phase], real.phases[phase]
            added = (ours.peak - ours.before) / (theirs.peak - theirs.before)
            rows.append(
                Row(
                    case.name, phase, rank, theirs.before, ours.peak, theirs.peak, ours.peak / theirs.peak, added,
                    astuple(plan.static) == astuple(real.static),
                )
            )  # fmt: skip
    return rows


def table(rows: Iterable[Row]) -> Table:
    """Return the table of the rows, in MiB."""
    made = Table("case", "phase", "rank", title="bytes of live tensors at the peak, in MiB", title_justify="left")
    for name in ("before", "predicted", "measured", "ratio", "of the phase"):
        made.add_column(name, justify="right")
    made.add_column("static")
    for row in rows:
        sizes = (f"{size / _MIB:.1f}" for size in (row.before, row.predicted, row.measured))
        made.add_row(
            row.case, row.phase, f"{row.rank}", *sizes, f"{row.ratio:.3f}", f"{row.ratio_of_phase:.3f}",
            "equal" if row.static_is_equal else "differs", style=None if row.is_good else "bold red",
        )  # fmt: skip
    return made


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_against_measured",
        description=benchmarks.plan_against_measured.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument(
        "--case", action="append", choices=[case.name for case in CASES], metavar="NAME", help="run this case"
    )
    made.add_argument("--output", type=Path, metavar="FILE", help="write the rows there, as JSON")
    made.add_argument(
        "--without-onednn", action="store_true", help="multiply bf16 without scratch memory, which takes longer"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print the table, and return the exit status."""
    options = parser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = _read(options.output)
    wanted = [case for case in CASES if (case.name in options.case if options.case else case.name not in found)]
    console, server = Console(width=None if sys.stdout.isatty() else _WIDTH_IN_FILES), ranks.context()
    for case in wanted:
        began = time.monotonic()
        rows = rows_of(case, ranks.predicted(case, server), ranks.measured(case, server, not options.without_onednn))
        found[case.name] = rows
        worst = max(rows, key=lambda row: abs(row.ratio - 1))
        console.print(f"{case.name}: ratio {worst.ratio:.3f} at worst, {time.monotonic() - began:.0f} s", style="dim")
        _write(options.output, found)
    rows = [row for case in CASES for row in found.get(case.name, ())]
    console.print(table(rows))
    return 0 if all(row.is_good for row in rows) else 1


def _read(path: Path | None) -> dict[str, list[Row]]:
    """Return the rows by case that a file of an earlier call has."""
    found: dict[str, list[Row]] = {}
    if path is not None and path.exists():
        for row in json.loads(path.read_text())["rows"]:
            found.setdefault(row["case"], []).append(Row(**row))
    return found


def _write(path: Path | None, found: dict[str, list[Row]]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) for case in CASES for row in found.get(case.name, ())]
        path.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())

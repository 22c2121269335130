"""Take over results that a GPU gave: keep them, and fill the table of figures in docs/performance.md."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import PARTS
from benchmarks.gpu_check.record import write_json
from benchmarks.gpu_check.report import RESULTS, figure_cells, is_as_predicted, read_results
from benchmarks.gpu_check.runner import REPOSITORY

PAGE = REPOSITORY / "docs" / "performance.md"
KEPT_RESULTS = REPOSITORY / "benchmarks" / "results" / "gpu"
BEGIN, END = "<!-- gpu figures -->\n", "<!-- end of gpu figures -->"
NAMES = ("part", "figure", "value", "spread", "predicted", "goal", "measured on")
_NUMBERS = ("value", "spread", "predicted")
NOT_MEASURED = "not yet measured"
ONE_RUN = "All values were measured on this card and day: {}.\n\n"  # above the table, in place of its last column

Lines = dict[tuple[str, str], tuple[str, ...]]  # (part, figure) → the other cells


def collect(directory: Path | None, page: Path = PAGE, kept: Path = KEPT_RESULTS) -> None:
    """Keep the results of a directory, and write their figures into the page. Other figures stay as they are.

    Args:
        directory: What the command has written. Without it, only the lines of the table are made those of the parts.
        page: The page.
        kept: The directory for results.

    Raises:
        FileNotFoundError: The directory has no results.
    """
    measured: Lines = {}
    if directory is not None:
        if not (directory / RESULTS).is_file():
            raise FileNotFoundError(f"{directory} has no {RESULTS}")
        results = read_results(directory)
        path = keep(results, kept)
        print(f"{path} has the results")
        measured = lines_of(results["parts"])
        for name, part in results["parts"].items():
            if part["status"] not in ("passed", "skipped"):
                print(f"{name}: {part['status']}")
            for figure in part["figures"]:
                if not is_as_predicted(figure):
                    value, _, prediction, *_ = figure_cells(figure)
                    print(f"{name}, {figure['name']}: {value}; predicted were {prediction.removesuffix(' (wrong)')}")
    text = page.read_text()
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    page.write_text(f"{before}{BEGIN}{fill_table(table, measured)}{END}{after}")


def keep(results: dict[str, Any], kept: Path) -> Path:
    """Write results to a file of their date and card, beside other parts that it may have, and return its path."""
    parts = [part for part in results["parts"].values() if part.get("started")]
    date = min(part["started"] for part in parts)[:10]
    card = re.sub(r"[^a-z0-9]+", "-", parts[0]["card"].lower()).strip("-")
    path = kept / f"{date}-{card}.json"
    earlier = read_results(path.parent, path.name)["parts"]
    begun = {name: part for name, part in results["parts"].items() if part.get("started")}
    write_json(path, results | {"parts": earlier | begun})
    return path


def lines_of(parts: dict[str, dict[str, Any]]) -> Lines:
    """Return the table's lines of figures that a GPU gave with full shapes."""
    return {
        (name, figure["name"]): (*figure_cells(figure), f"{part['card']}, {part['started'][:10]}")
        for name, part in parts.items()
        if part["device"] == "cuda" and not part["tiny"]
        for figure in part["figures"]
    }


def fill_table(table: str, measured: Lines) -> str:
    """Return the table with a line for every figure of the parts: as measured, as before, or not yet measured.

    The card and the date are above the table if they are the same for all figures.
    """
    before = _read_table(table)
    names = [(name, row) for name in PARTS for row in _rows(name)]
    # A part may report figures that it does not announce.
    names += [key for key in [*before, *measured] if key not in names and _is_kept(key, before, measured)]
    lines: list[tuple[str, ...]] = []
    for key in sorted(dict.fromkeys(names), key=lambda key: list(PARTS).index(key[0])):
        cells = measured.get(key) or before.get(key) or (NOT_MEASURED, *[""] * (len(NAMES) - 3))
        *others, goal, card = cells
        goal = goal or before.get(key, ("", "", "", "", ""))[-2]  # one that was written by hand
        lines.append((*key, *others, goal, card))
    heading, cards = "", {card for *_, card in lines if card}
    if len(cards) == 1:
        heading, lines = ONE_RUN.format(*cards), [line[:-1] for line in lines]
    columns = NAMES[: len(lines[0])]
    rule = "|" + "|".join("---:" if name in _NUMBERS else "---" for name in columns) + "|\n"
    return f"{heading}{_line(columns)}{rule}{''.join(map(_line, lines))}"


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def _read_table(table: str) -> Lines:
    """Return the lines of a table that `fill_table` wrote."""
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    if one_run := re.match(re.escape(ONE_RUN.strip()).replace(r"\{\}", "(.+)") + "\n", table):
        rows = [(*row, "" if row[2] == NOT_MEASURED else one_run[1]) for row in rows]
    return {(part, figure): tuple(cells) for part, figure, *cells in rows}


def _is_kept(key: tuple[str, str], before: Lines, measured: Lines) -> bool:
    return key[0] in PARTS and (key in measured or before[key][0] != NOT_MEASURED)


def _rows(name: str) -> list[str]:
    return importlib.import_module(f"benchmarks.gpu_check.parts.{name}").rows(False)

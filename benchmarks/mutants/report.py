"""Write what a campaign has found: a table by subpackage, and every mutant that survives, with the reason if known."""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from benchmarks.mutants.generate import Mutant
from benchmarks.mutants.plugin import TIERS
from benchmarks.mutants.source import SUBPACKAGES

SURVIVORS = Path(__file__).with_name("survivors.toml")
TITLES = {
    "general": "General mutants", "field": "The field's own mutants", "fix": "Mended defects, put back",
    None: "All mutants",
}  # fmt: skip
_CAUGHT = ("killed", "timeout")


class UnknownMutants(ValueError):
    """The error if a reason is given for mutants that do not exist."""


def read_reasons(ids: Container[str], table: Path = SURVIVORS) -> dict[str, str]:
    """Return why mutants are equivalent to the package, by id.

    Args:
        ids: The ids of all mutants, also of those that the sample leaves out after an edit of the package.
        table: The file of the reasons.

    Raises:
        UnknownMutants: A mutant of the table does not exist.
    """
    reasons = {entry["id"]: entry["reason"] for entry in tomllib.loads(table.read_text()).get("equivalent", ())}
    unknown = sorted(each for each in reasons if each not in ids)
    if unknown:
        raise UnknownMutants(f"{table.name} has reasons for mutants that do not exist: {', '.join(unknown)}")
    return reasons


def write_report(mutants: Sequence[Mutant], lines: Sequence[dict[str, Any]], reasons: dict[str, str]) -> str:
    """Return the report of a campaign as Markdown."""
    results = {line["id"]: line for line in lines}
    text = []
    for kind, title in TITLES.items():
        chosen = [mutant for mutant in mutants if kind in (None, mutant.kind)]
        text += [f"## {title}", "", *_table(chosen, results, reasons), ""]
    text += ["## Survivors", ""]
    for mutant in mutants:
        status = results.get(mutant.id, {}).get("status", "not run")
        if _is_open(mutant, results) and mutant.id not in reasons:
            status = "open"
        if status not in _CAUGHT or mutant.id in reasons:
            reason = f" Equivalent: {reasons[mutant.id]}" if mutant.id in reasons else ""
            text.append(f"- `{mutant.id}` (line {mutant.line}, {status}): {describe(mutant)}{reason}")
    return "\n".join(text) + "\n"


def describe(mutant: Mutant) -> str:
    """Return what a mutant changes, on one line."""
    before, after = (" ".join(text.split())[:90] for text in (mutant.before, mutant.after))
    return f"{mutant.description}: `{before}` → `{after}`"


def _table(mutants: Sequence[Mutant], results: dict[str, Any], reasons: dict[str, str]) -> list[str]:
    rows = ["| subpackage | mutants | equivalent | open | killed by fast tests | by the change tier | by all |"]
    rows.append("|---|---:|---:|---:|---:|---:|---:|")
    by_part: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in mutants:
        by_part[mutant.subpackage].append(mutant)
    parts = [*SUBPACKAGES, *sorted(by_part.keys() - set(SUBPACKAGES))]
    for name, chosen in [*((part, by_part[part]) for part in parts if by_part[part]), ("all", list(mutants))]:
        ran = [results[mutant.id] for mutant in chosen if mutant.id not in reasons and not _is_open(mutant, results)]
        equivalent = sum(mutant.id in reasons for mutant in chosen)
        tiers = Counter(line["tier"] or "fast" for line in ran if line["status"] in _CAUGHT)
        killed = [tiers["fast"], tiers["fast"] + tiers["change"], tiers.total()]
        counted = len(chosen) - equivalent  # an open one has not been killed
        missing = counted - len(ran)
        shares = [f"{number} ({number / counted:.1%})" if counted else "0" for number in killed]
        rows.append(f"| {name} | {len(chosen)} | {equivalent} | {missing} | {' | '.join(shares)} |")
    return rows


def _is_open(mutant: Mutant, results: dict[str, Any]) -> bool:
    """Return whether only fast tests have run on a mutant, and none of them has failed."""
    line = results.get(mutant.id)
    return line is None or (line["status"] not in _CAUGHT and line.get("up_to") == TIERS[0])


def write_matrix(lines: Sequence[dict[str, Any]]) -> str:
    """Return, for each test and each file of tests, the mutants that it kills and those that nothing else kills."""
    killed: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        for test in line.get("failed", ()):
            killed[test].add(line["id"])
            killed[test.partition("::")[0]].add(line["id"])
    num_tests = {line["id"]: len(line.get("failed", ())) for line in lines}
    of_files: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        of_files[line["id"]] = {test.partition("::")[0] for test in line.get("failed", ())}
    rows = ["| test or file | kills | alone |", "|---|---|---|"]
    for name, ids in sorted(killed.items(), key=lambda each: (each[0].partition("::")[0], each[0])):
        alone = [one for one in ids if (num_tests[one] == 1 if "::" in name else of_files[one] == {name})]
        rows.append(f"| `{name}` | {len(ids)} | {len(alone)} |")
    return "\n".join(rows) + "\n"

"""Say what the tests catch: change the package in one place after another, and see whether a test fails.

    python -m benchmarks.mutants list                          # every mutant, with its id
    python -m benchmarks.mutants reach --tier fast             # record which tests reach which block of the package
    python -m benchmarks.mutants run --shard 1/2               # the tests that reach a mutant, until one fails
    python -m benchmarks.mutants report > outputs/mutants.md   # a table by subpackage, and the survivors

A third of the mutants change code as in any program (operators.py: GENERAL); others are mistakes of this field: a
collective, a mask, a temperature or a version that is left out, tokens shifted by one, another process group
(operators.py: FIELD, and field.toml, which has what no pattern finds). Those of fixes.toml put back defects that were
mended, each in one place. `survivors.toml` names those that compute the
same as the package.

`reach` and `run` continue where they stopped. A result is kept as long as the mutated text and its tests stay. Both
work on copies of the tracked files, and keep what they find in `--out`, which git ignores: the record is large, takes
as long as the tests do, and depends on the commit.

mutmut puts all mutants of a function beside it, chosen by a call at run time, so that it cannot change code at module
level or what Triton and the tests' shape checks read of the source, and it knows only what a test reaches in its own
process, not in forks and ranks. cosmic-ray starts one command for each mutant, which would import torch and
megatron-core anew and run tests that do not reach it, and it leaves the ranks of a mutant that hangs running.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from benchmarks.mutants.campaign import Campaign, read_lines
from benchmarks.mutants.copies import REPOSITORY, Copy
from benchmarks.mutants.generate import Mutant, Package, StaleTable
from benchmarks.mutants.plugin import TIERS
from benchmarks.mutants.reach import Reach, record
from benchmarks.mutants.report import UnknownMutants, describe, read_reasons, write_matrix, write_report

RESULTS, MATRIX = "results.jsonl", "matrix.jsonl"


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands."""
    options = _parser().parse_args(arguments)
    if options.command == "reach":
        copy = Copy(options.scratch / "reach")
        return record(options.out, options.tests, options.tier, options.pytest, copy, Package(copy.package))
    try:
        package = Package(REPOSITORY / "rl_megatron")
        mutants, reasons = package.mutants(), read_reasons(package.ids())
    except (StaleTable, UnknownMutants) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.command == "list":
        for mutant in mutants:
            print(f"{mutant.id}\n    line {mutant.line}, {mutant.kind}: {describe(mutant)}")
        kinds = Counter(mutant.kind for mutant in mutants)
        print(f"{len(mutants)} mutants: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
    elif options.command == "run":
        return _run(options, mutants, reasons)
    elif options.matrix:
        print(write_matrix(read_lines(options.out / MATRIX)), end="")
    else:
        print(write_report(mutants, read_lines(options.out / RESULTS), reasons), end="")
    return 0


def _run(options: argparse.Namespace, mutants: list[Mutant], reasons: dict[str, str]) -> int:
    index, number = map(int, options.shard.split("/"))
    chosen = [mutant for place, mutant in enumerate(mutants) if place % number == index - 1]
    if options.ids:
        chosen = [mutant for mutant in mutants if any(mutant.id.startswith(each) for each in options.ids)]
    chosen = [mutant for mutant in chosen if options.ids or mutant.id not in reasons]
    if options.kind:
        chosen = [mutant for mutant in chosen if mutant.kind == options.kind]
    copy = Copy(options.scratch / f"shard{index}" / "copy")
    campaign = Campaign(
        options.out, copy, Package(copy.package), Reach(options.out), options.tier, options.seconds, options.pytest,
        MATRIX if options.matrix else RESULTS, options.matrix,
    )  # fmt: skip
    campaign.run(chosen)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    help_of = {
        "list": "print every mutant", "reach": "record which tests reach which blocks", "run": "run tests on mutants",
        "report": "print the table and the survivors as Markdown",
    }  # fmt: skip
    of_command = {name: commands.add_parser(name, help=text) for name, text in help_of.items()}
    for each in of_command.values():
        each.add_argument("--out", type=Path, default=Path("outputs/mutants"), help="the directory of what is found")
    for name in ("reach", "run"):
        each = of_command[name]
        each.add_argument("--tier", choices=TIERS, default="change", help="the slowest tests that run")
        each.add_argument("--scratch", type=Path, default=Path("outputs/m"), help="where copies lie; a short path")
        each.add_argument(
            "--pytest", action="append", default=[], help="an option of pytest, as in --pytest=--tier=nightly"
        )
    of_command["reach"].add_argument("--tests", nargs="+", default=["tests"], help="paths of tests")
    run = of_command["run"]
    run.add_argument("ids", nargs="*", help="run these only; the beginning of an id is enough")
    run.add_argument("--shard", default="1/1", help="i/n: every n-th mutant, from the i-th on")
    run.add_argument("--seconds", type=float, default=120.0, help="how long a mutant's tests of a tier take at most")
    run.add_argument("--kind", choices=("general", "field", "fix"))
    for name in ("run", "report"):
        text = "run all tests of a mutant, and list what each test kills" if name == "run" else "print that list"
        of_command[name].add_argument("--matrix", action="store_true", help=text)
    return parser


if __name__ == "__main__":
    sys.exit(main())

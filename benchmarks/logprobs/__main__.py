"""Parse the command line. The package's docstring says what is measured."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

import benchmarks.logprobs
from benchmarks.logprobs import ranks, report
from benchmarks.logprobs.cases import CPU, DTYPES, GPU, MODES, QUICK, Grid
from benchmarks.logprobs.variants import peer_variant


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.logprobs",
        description=benchmarks.logprobs.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    made.add_argument("--quick", action="store_true", help="small shapes, seconds")
    made.add_argument("--modes", nargs="+", choices=MODES, help="default: all")
    made.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), help="default: all")
    made.add_argument("--tokens", nargs="+", type=int, help="N")
    made.add_argument("--vocab", nargs="+", type=int, help="V, over all ranks")
    made.add_argument("--hidden", nargs="+", type=int, help="H, of the fused mode")
    made.add_argument("--tensor", nargs="+", type=int, help="ranks that the vocabulary is cut over")
    made.add_argument("--shards", nargs="+", type=int, help="shapes of one rank's shard of so many, without the others")
    made.add_argument("--repetitions", type=int, help="of each variant, interleaved (default 9; 20 on a GPU; quick: 3)")
    made.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="over all ranks (default: cores)"
    )
    made.add_argument("--time-limit", type=float, metavar="SECONDS", help="begin no case after that")
    made.add_argument("--peer", action="append", default=[], metavar="MODULE:FUNCTION", help="race this as well")
    made.add_argument("--output", type=Path, metavar="DIR", help="write logprobs.json and logprobs.png there")
    made.add_argument("--markdown", action="store_true", help="print Markdown instead of tables")
    return made


def grid_of(options: argparse.Namespace, device: str) -> Grid:
    """Return the defaults of the device, changed by the options."""
    grid = QUICK if options.quick else CPU if device == "cpu" else GPU
    given = {
        "modes": options.modes, "dtypes": options.dtypes, "tokens": options.tokens, "vocabs": options.vocab,
        "hidden": options.hidden, "tensor": options.tensor, "shards": options.shards,
    }  # fmt: skip
    changes = {name: tuple(values) for name, values in given.items() if values}
    if changes.keys() & {"tokens", "vocabs", "hidden", "shards", "dtypes"}:
        changes["further"] = ()
    return replace(grid, **changes)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    grid = grid_of(options, device)
    try:
        _check(grid, device)
        for peer in options.peer:
            peer_variant(peer, torch.device("cpu"))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    repetitions = options.repetitions or (3 if options.quick else 20 if device == "cuda" else 9)
    plan = ranks.Plan(device, grid, tuple(options.peer), repetitions, options.threads, options.time_limit)
    measured, where, left_out = ranks.run(plan)
    # In a file, tables are not cut to the width of a terminal.
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.markdown:
        print(report.markdown(measured, where))
    else:
        console.print(report.heading(where), highlight=False)
        for case, results in measured:
            console.print(report.table(case, results))
    if left_out:
        whole = len(left_out) + len(measured)
        console.print(f"not begun within {options.time_limit:g} s: {len(left_out)} of {whole} cases")
    if options.output:
        report.write(options.output, measured, where)
    ours = [result for _, results in measured for result in results if result.is_ours]
    failed = [f"{result.variant}: {result.failed}" for result in ours if result.failed]
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed or not measured else 0


def _check(grid: Grid, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here")
    if device == "cuda" and max(grid.tensor) > torch.cuda.device_count():
        raise ValueError(f"--tensor {max(grid.tensor)}: there are {torch.cuda.device_count()} GPUs; try --shards")
    for vocab in grid.vocabs:
        for cut in (*grid.tensor, *grid.shards):
            if vocab % cut:
                raise ValueError(f"--vocab {vocab} is not divisible by {cut}, over which it is cut")


if __name__ == "__main__":
    sys.exit(main())

"""Let random faults hit runs of four ranks, and check that each run recovers.

    python -m benchmarks.faults --out outputs/faults
    python -m benchmarks.faults --shard 1/4 --out outputs/faults    # a quarter of them, for one of four machines
    python -m benchmarks.faults --out outputs/faults --table        # print the table of docs/reliability.md

A fault is good if the run recovers by itself, or ends with a message and goes on with the same command. Its metrics
must then equal those of an undisturbed run to the bit, and all its checkpoints must be there and undamaged. The log of
an asynchronous run must have every group once, and its replay must have the metrics of the run to the bit. A file in
the output directory has a line for each fault; started again, the command goes on where it stopped. The exit status is
1 if a fault was not good.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra._internal.hydra  # noqa: F401  # these before the first fork, because each takes a second
import matplotlib.pyplot  # noqa: F401

import rl_megatron.runs.run  # noqa: F401
from benchmarks.faults.cases import ASYNCHRONOUS_COUNTS, COUNTS, DISK_COUNTS, RUNS, faults
from benchmarks.faults.full_disk import enter_namespace
from benchmarks.faults.judge import CONTINUED, GOOD, NAMED, RECOVERED, Wrong, outcome_of, undisturbed


def main(arguments: list[str] | None = None) -> int:
    """Run the faults that have no result yet, and print a summary."""
    parser = argparse.ArgumentParser(description="Let random faults hit runs, and check that each run recovers.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th of N parts, from 1")
    parser.add_argument("--vllm", action="store_true", help="run the faults of vLLM servers instead of the others")
    parser.add_argument("--asynchronous", action="store_true", help="run the faults of asynchronous runs instead")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="the numbers of faults to run")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time; a later call goes on")
    parser.add_argument("--out", type=Path, default=Path("outputs/faults"))
    parser.add_argument("--table", action="store_true", help="print the table of the results, and run nothing")
    options = parser.parse_args(arguments)
    out = options.out.absolute()
    every = faults(options.seed)
    part, parts = options.shard
    wanted_part = "asynchronous" if options.asynchronous else "vllm" if options.vllm else "plain"
    chosen = [fault for fault in every if fault.number % parts == part - 1 and RUNS[fault.run].part == wanted_part]
    if options.only is not None:
        chosen = [fault for fault in every if fault.number in options.only]
    if any(fault.target == "disk" for fault in chosen) and not options.table:
        enter_namespace("benchmarks.faults", sys.argv[1:] if arguments is None else arguments)
    out.mkdir(parents=True, exist_ok=True)
    results = out / f"results-seed-{options.seed}.jsonl"
    done = _read(results)
    if options.table:
        print(table(list(done.values())))
        return 0
    began = time.monotonic()
    gc.freeze()  # a collection in a fork then skips what is never freed
    finished = sum(fault.number in done for fault in chosen)
    print(f"seed {options.seed}: {finished} of {len(chosen)} faults have a result", flush=True)
    for fault in chosen:
        if fault.number in done:
            continue
        if time.monotonic() - began > 60 * options.minutes:
            break
        try:
            kept = out / f"{re.sub(r'[^a-z]+', '-', fault.run.lower())}.json"
            wanted = [] if RUNS[fault.run].is_asynchronous else undisturbed(fault.run, kept)
        except Wrong as wrong:
            print(f"error: {fault.run}: {wrong}", file=sys.stderr)
            return 1
        directory = out / f"fault-{fault.number}"
        result = asdict(fault) | {"kind": fault.kind} | outcome_of(fault, directory, wanted)
        if result["outcome"] in GOOD:
            shutil.rmtree(directory)
            result["said"] = result["said"].strip().rpartition("\n")[2][:300]
        done[fault.number] = result
        with results.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(f"#{fault.number} {_described(result)}", flush=True)
    return _report(options.seed, [done[fault.number] for fault in chosen if fault.number in done])


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 ≤ I ≤ N")
    return int(found[1]), int(found[2])


def _read(results: Path) -> dict[int, dict[str, Any]]:
    lines = results.read_text().splitlines() if results.exists() else []
    return {line["number"]: line for line in map(json.loads, lines)}


def _described(result: dict[str, Any]) -> str:
    where = f"{result['run']}: {result['kind']} of rank {result['rank']} in call {result['call']} of {result['moment']}"
    return f"{where}: {result['outcome']} ({result['seconds']:.0f} s)"


def _report(seed: int, results: Sequence[dict[str, Any]]) -> int:
    outcomes = Counter(result["outcome"] for result in results)
    print(f"seed {seed}: {len(results)} faults; " + ", ".join(f"{count} {name}" for name, count in outcomes.items()))
    failed = [result for result in results if result["outcome"] not in GOOD]
    for result in failed[:50]:
        print(f"#{result['number']} {_described(result)}")
    return 1 if failed else 0


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table of the results: a row for each kind of fault, and one for each run, that were hit."""
    rows = [f"| what is hit | faults | {RECOVERED} | {CONTINUED} | {NAMED} | wrong |", "|---|---|---|---|---|---|"]
    for name, key in (
        *((f"{target}: {action}", "kind") for target, action in {**COUNTS, **DISK_COUNTS, **ASYNCHRONOUS_COUNTS}),
        *((name, "run") for name in RUNS),
        ("all", None),
    ):
        found = [result["outcome"] for result in results if key is None or result[key] == name]
        if not found:
            continue
        counted = [sum(outcome == good for outcome in found) for good in GOOD]
        numbers = (len(found), *counted, len(found) - sum(counted))
        rows.append(f"| {name} | " + " | ".join(map(str, numbers)) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())

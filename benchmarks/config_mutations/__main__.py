"""Run random mutations of valid configurations, and report which were refused, which ran, and which failed.

    python -m benchmarks.config_mutations --count 2000 --seed 0 --jobs 2 --out outputs/mutations

Every mutation is a fork of this process, which has imported torch and megatron-core. It succeeds if the command is
refused in one line that names the changed key, or runs for a step. `results.jsonl` in the output directory has a line
for each; started again with the same seed, the command goes on where it stopped. The exit status is 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

import rl_megatron.runs.run  # before the first fork
from benchmarks.config_mutations.bases import BASES, TINY, write_files
from benchmarks.config_mutations.mutate import mutation
from rl_megatron.cli import main as rl_megatron
from rl_megatron.config.loading.load import load_config, to_yaml
from rl_megatron.observability.run_files import flatten

_LIMIT_SECONDS = 120.0


def main(arguments: list[str] | None = None) -> int:
    """Run the mutations that have no result yet, and print a summary."""
    parser = argparse.ArgumentParser(description="Run random mutations of valid configurations.")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time; a later call goes on")
    parser.add_argument("--out", type=Path, default=Path("outputs/mutations"))
    options = parser.parse_args(arguments)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    done = {line["number"]: line for line in map(json.loads, lines)}
    work = out / "files"
    work.mkdir(exist_ok=True)
    write_files(work)
    os.chdir(work)
    keys = {name: _keys(base) for name, base in BASES.items()}
    print(f"seed {options.seed}: {len(done)} of {options.count} mutations have a result", flush=True)
    begun, running = time.monotonic(), {}
    waiting = [number for number in range(options.count) if number not in done]
    with results.open("a") as file:
        while running or waiting:
            late = time.monotonic() - begun > 60 * options.minutes
            waiting = [] if late else waiting
            while waiting and len(running) < options.jobs:
                number = waiting.pop(0)
                running[_start(number, options.seed, keys, out)] = (number, time.monotonic())
            for pid, result in _finished(running, options.seed, keys, out):
                del running[pid]
                done[result["number"]] = result
                file.write(json.dumps(result) + "\n")
                file.flush()
    return _report(options.seed, [done[number] for number in sorted(done) if number < options.count])


def _keys(base: tuple[str, ...]) -> dict[str, Any]:
    """Return the keys that can be changed, with their values: those of a run without named stages."""
    tree = yaml.safe_load(to_yaml(load_config([*TINY, *base])))
    (stage,) = tree.pop("stages").values()
    return flatten({**stage, **tree})


def _case(number: int, seed: int, keys: dict[str, dict[str, Any]]) -> tuple[str, Any]:
    chance = random.Random(f"{seed}/{number}")
    name = chance.choice(sorted(BASES))
    return name, mutation(chance, keys[name])


def _start(number: int, seed: int, keys: dict[str, dict[str, Any]], out: Path) -> int:
    """Fork a process that runs the mutation, and return its id."""
    name, mutated = _case(number, seed, keys)
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)  # so that its own processes can be ended with it
    said = os.open(out / f"said-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    status = 99
    try:
        directory = f"output_dir={out / f'run-{number}'}"
        status = rl_megatron(["train", *TINY, directory, *BASES[name], *mutated.overrides])
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 98
    except BaseException:
        traceback.print_exc()  # a failure
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _finished(running: dict[int, Any], seed: int, keys: dict[str, Any], out: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the results of the processes that ended, after waiting a moment."""
    time.sleep(0.05)
    ended = []
    for pid, (number, began) in list(running.items()):
        gone, status = os.waitpid(pid, os.WNOHANG)
        seconds = time.monotonic() - began
        if not gone and seconds < _LIMIT_SECONDS:
            continue
        if not gone:
            os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        name, mutated = _case(number, seed, keys)
        file = out / f"said-{number}"
        said = file.read_text(errors="replace")
        words = mutated.words
        if mutated.kind == "other choice":  # another choice may contradict, or need, any other key
            words += tuple(override.partition("=")[0] for override in (*TINY, *BASES[name])) + tuple(keys[name])
        outcome = _outcome(os.waitstatus_to_exitcode(status), said, words)
        result = {"number": number, "base": name, "kind": mutated.kind, "overrides": mutated.overrides}
        result |= {"outcome": outcome, "seconds": round(seconds, 1)}
        result["said"] = said[-3000:] if outcome not in ("ran", "refused") else said.strip().rpartition("\n")[2][:300]
        file.unlink()
        shutil.rmtree(out / f"run-{number}", ignore_errors=True)
        ended.append((pid, result))
    return ended


def _outcome(status: int, said: str, words: tuple[str, ...]) -> str:
    """Return "ran", "refused", or what is wrong."""
    if "Traceback (most recent call last)" in said:
        return "traceback"
    if status == 0:
        return "ran"
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    if status not in (1, 2) or len(errors) != 1:
        return f"status {status}"
    if status == 1:
        return "ended in one line"
    named = any(re.search(rf"(?<![\w.]){re.escape(word)}(?!\w)", errors[0]) for word in words)
    named = named or any(re.search(rf"\b{re.escape(word)}\b", errors[0]) for word in words)
    return "refused" if named else "refused without the key"


def _report(seed: int, results: list[dict[str, Any]]) -> int:
    outcomes = Counter(result["outcome"] for result in results)
    failed = [result for result in results if result["outcome"] not in ("ran", "refused", "ended in one line")]
    print(f"seed {seed}: {len(results)} mutations; " + ", ".join(f"{count} {name}" for name, count in outcomes.items()))
    for result in failed[:50]:
        last = result["said"].strip().rpartition("\n")[2][:300]
        print(f"#{result['number']} {result['base']}: {' '.join(result['overrides'])}: {result['outcome']}: {last}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

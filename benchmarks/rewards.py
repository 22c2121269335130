"""Measure how many samples per second reward workers score, compared with workers that never wait:

    python benchmarks/rewards.py
    python benchmarks/rewards.py --samples 64 --workers 2 --milliseconds 20

Every sample is scored by a function that sleeps. With W workers and a function of t seconds, the ideal is W / t samples
per second. The first call starts the workers, and is reported apart; the others are those of a run's later steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rl_megatron.config.rewards import RewardConfig, RewardFunctionConfig
from rl_megatron.data.tasks import Problem
from rl_megatron.rewards.scorer import Scorer
from rl_megatron.topology.ranks import Ranks

_FUNCTIONS = """
import asyncio
import time


def waits(completion):
    time.sleep({seconds})
    return 1.0


async def waits_async(completion):
    await asyncio.sleep({seconds})
    return 1.0


def at_once(completion):
    return 1.0
"""


def measure(file: Path, name: str, num_samples: int, num_workers: int, repetitions: int) -> tuple[float, float]:
    """Return the seconds of the first call, and the median of the others."""
    config = RewardConfig(functions=(RewardFunctionConfig(path=str(file), name=name),), num_workers=num_workers)
    scorer = Scorer(config, lambda: None, Ranks())  # pyright: ignore[reportArgumentType]  # no task: there is a function
    problems = [Problem("prompt " * 50, "1")] * num_samples
    completions, ids = ["completion " * 50] * num_samples, [list(range(256))] * num_samples
    seconds = []
    try:
        for _ in range(repetitions + 1):
            began = time.perf_counter()
            rewards, _ = scorer.score(problems, completions, ids, [False] * num_samples)
            seconds.append(time.perf_counter() - began)
            assert rewards.sum() == num_samples
    finally:
        scorer.close()
    return seconds[0], statistics.median(seconds[1:])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--samples", type=int, default=512)
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--milliseconds", type=float, default=50.0, help="how long the function takes")
    options.add_argument("--repetitions", type=int, default=3)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each number of workers, and one for functions that do not wait."""
    options = parser().parse_args(arguments)
    seconds = options.milliseconds / 1000
    print(
        f"{options.samples} samples, a function of {options.milliseconds:g} ms, median of {options.repetitions} calls"
    )
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "sleeping.py"
        file.write_text(_FUNCTIONS.format(seconds=seconds))
        for workers in options.workers:
            first, later = measure(file, "waits", options.samples, workers, options.repetitions)
            rate, ideal = options.samples / later, workers / seconds
            print(
                f"{workers} workers: {rate:.1f} samples/s, ideal {ideal:.1f}, ratio {rate / ideal:.2f}; "
                f"first call {first:.2f} s, later ones {later:.2f} s"
            )
        for name in ("waits_async", "at_once"):
            first, later = measure(file, name, options.samples, 1, options.repetitions)
            print(f"1 worker, {name}: {options.samples / later:.0f} samples/s; first call {first:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compare the training metrics of runs: `python compare_metrics.py RUN OTHER_RUN… [--metrics loss grad_norm]`.

A run is its output_dir. The status is 1 if a metric of another run differs from the first run's by more than 1e-4 of
its size at any step.
"""

import argparse
import json
import sys
from pathlib import Path

TOLERANCE = 1e-4


def training_steps(run: str) -> dict[tuple[str, int], dict[str, float]]:
    """Return the metrics of each training step of a run, by stage and step."""
    lines = map(json.loads, (Path(run) / "metrics.jsonl").read_text().splitlines())
    return {(line["stage"], line["step"]): line for line in lines if line["kind"] == "train"}


def largest_difference(run: dict, other: dict, metrics: list[str]) -> float:
    """Return the largest difference of a metric at any step, as a share of the first run's value."""
    if run.keys() != other.keys():
        sys.exit("the runs have different steps")
    pairs = [(run[step][name], other[step][name]) for step in run for name in metrics if name in run[step]]
    return max(abs(theirs - ours) / max(abs(ours), 1e-12) for ours, theirs in pairs)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--metrics", nargs="+", default=["loss", "grad_norm"])
    arguments = parser.parse_args()
    first, differences = training_steps(arguments.runs[0]), []
    print(f"{'run':40} {'steps':>5} {'last loss':>10} {'largest difference':>18}")
    for name in arguments.runs:
        run = training_steps(name)
        differences.append(largest_difference(first, run, arguments.metrics))
        last = list(run.values())[-1]
        print(f"{name:40} {len(run):5} {last['loss']:10.6f} {differences[-1]:18.1e}")
    return int(max(differences) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

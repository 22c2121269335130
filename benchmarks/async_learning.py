"""Compare what asynchronous and synchronous GRPO learn: the held-out accuracy of the quickstart over several seeds.

    python -m benchmarks.async_learning outputs/async_learning --seeds 5

Every run starts from one SFT checkpoint, which is trained first, and has the GRPO stage of the quickstart on one rank
with a rollout engine in a process of its own. A run whose result is there already is not made again, so the command
goes on where it was ended. It prints the mean accuracy of each kind of run with its standard error.

With an engine that is fast, nearly all trajectories are as old as they may be, so a bound of n steps means that tokens
are n steps old.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

KINDS = {
    "synchronous": (),
    "age 1": ("rollout.async_enabled=true", "rollout.max_trajectory_age_steps=1"),
    "age 4": ("rollout.async_enabled=true", "rollout.max_trajectory_age_steps=4"),
    "age 4, uncorrected": (
        "rollout.async_enabled=true", "rollout.max_trajectory_age_steps=4", "rollout.importance_correction=off",
    ),
}  # fmt: skip
ARITHMETIC = (
    "data=arithmetic", "data.task={name: arithmetic, operators: ['+'], max_operand: 99, zero_pad: true}",
    "data.num_demonstrations=512", "data.num_eval_examples=400", "generation.max_new_tokens=5",
)  # fmt: skip
GRPO = (
    "algorithm=grpo", "algorithm.prompts_per_step=64", "algorithm.samples_per_prompt=8", "optimizer.lr=6e-5",
    "optimizer.min_lr=2e-5", "optimizer.warmup_steps=5", "optimizer.weight_decay=0.0", "train.global_batch_size=512",
    "train.eval_every=20", "loss.reference_policy_kl_penalty=0.0", "generation.engine=transformers",
)  # fmt: skip


def run(*arguments: str, log: Path) -> None:
    """Run the command line, and end this program if it fails."""
    with log.open("w") as output:
        done = subprocess.run([sys.executable, "-m", "rl_megatron", *arguments], stdout=output, stderr=output)
    if done.returncode != 0:
        sys.exit(f"rl_megatron {' '.join(arguments)} ended with status {done.returncode}; see {log}")


def starting_point(directory: Path, overrides: Sequence[str]) -> Path:
    """Return the checkpoint of the quickstart's SFT stage, which is trained if it is not there."""
    output = directory / "sft"
    if not (output / "summary.json").exists():
        run(
            "train",
            "experiment=quickstart",
            "~stages.grpo",
            f"output_dir={output}",
            *overrides,
            log=directory / "sft.log",
        )
    return max((output / "checkpoints" / "sft").glob("step-*"))


def accuracy(output: Path) -> float | None:
    """Return the last held-out accuracy of a run, or None if it has not ended."""
    summary = output / "summary.json"
    return json.loads(summary.read_text())["accuracy"]["grpo"] if summary.exists() else None


def results(directory: Path, seeds: int, steps: int, overrides: Sequence[str]) -> dict[str, list[float]]:
    """Return the accuracies of each kind of run, after making those that are missing."""
    directory.mkdir(parents=True, exist_ok=True)
    start = starting_point(directory, overrides)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for seed in range(seeds):
        for kind, changes in KINDS.items():
            output = directory / f"{kind.replace(',', '').replace(' ', '-')}-{seed}"
            if accuracy(output) is None:
                run(
                    "train", *GRPO, *ARITHMETIC, "model=init_from", f"init_from={start}",
                    f"tokenizer.path={directory / 'sft' / 'tokenizer'}", f"train.steps={steps}", f"train.seed={seed}",
                    f"output_dir={output}", *changes, *overrides, log=directory / f"{output.name}.log",
                )  # fmt: skip
            result = accuracy(output)
            assert result is not None, output
            found[kind].append(result)
            print(f"seed {seed}, {kind}: {result:.4f}", flush=True)
    return found


def report(found: dict[str, list[float]]) -> list[str]:
    """Return a line for each kind of run."""
    lines, base = [], found["synchronous"]
    for kind, values in found.items():
        mean = statistics.fmean(values)
        if len(values) < 2:
            lines.append(f"{kind}: {mean:.4f}")
            continue
        error = statistics.stdev(values) / math.sqrt(len(values))
        both = math.hypot(error, statistics.stdev(base) / math.sqrt(len(base)))
        away = (mean - statistics.fmean(base)) / both if both else 0.0
        lines.append(f"{kind}: {mean:.4f} ± {error:.4f}, {away:+.1f} standard errors from synchronous")
    return lines


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("directory", type=Path, help="where the runs are kept")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--steps", type=int, default=80, help="steps of GRPO")
    made.add_argument("overrides", nargs="*", help="overrides of all runs")
    return made


def main(arguments: list[str]) -> int:
    """Make the runs that are missing, and print the accuracies."""
    given = parser().parse_args(arguments)
    for line in report(results(given.directory, given.seeds, given.steps, given.overrides)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

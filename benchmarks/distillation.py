"""Compare what a student of half the width learns from a teacher off-policy and on-policy, over several seeds.

    python -m benchmarks.distillation outputs/distillation --seeds 3

The teacher is the last model of the quickstart, which is trained first, or that of the run `--teacher`. The student is
pretrained and fine-tuned as the quickstart does it. From this checkpoint the runs go on with the same loss over the
whole vocabulary, learning rate and number of sequences in a step, so the teacher reads as many sequences in each. They
learn from the quickstart's 512 answers, from a new answer in every step, or from the student's own completions.

A run whose result is there already is not made again, so the command goes on where it was ended. It prints the mean
held-out accuracy of each kind of run with its standard error, and the steps and seconds until the student is within 5
points of the teacher. Seconds are steps times the median time of a step, without evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEQUENCES = 128  # of a step
EVAL_EVERY = 20
WITHIN = 0.05
KINDS = {
    "off-policy, 512 answers": ("algorithm=distillation", "data.num_demonstrations=512"),
    "off-policy, new answers": ("algorithm=distillation",),
    "on-policy": ("algorithm=opd", f"algorithm.prompts_per_step={SEQUENCES}"),
}
STUDENT = ("model.hidden_size=64", "model.ffn_hidden_size=192")
ARITHMETIC = (
    "data=arithmetic", "data.task={name: arithmetic, operators: ['+'], max_operand: 99, zero_pad: true}",
    "data.num_eval_examples=400", "generation.max_new_tokens=5",
)  # fmt: skip
DISTILLATION = (
    "model=init_from", "loss=full_distillation", "loss.kl_type=forward", "optimizer.lr=1.5e-3", "optimizer.min_lr=5e-4",
    "optimizer.warmup_steps=10", f"train.global_batch_size={SEQUENCES}", f"train.micro_batch_size={SEQUENCES}",
    "train.batching=padded", f"train.eval_every={EVAL_EVERY}",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a run has learned: its held-out accuracy after each number of steps, and the median seconds of a step."""

    accuracies: dict[int, float]
    step_seconds: float

    def steps_until(self, accuracy: float) -> int | None:
        """Return the steps after which an evaluation first had this accuracy, or None if none had."""
        return next((step for step, value in sorted(self.accuracies.items()) if value >= accuracy), None)


def run(output: Path, *arguments: str) -> Path:
    """Train in `output` unless that is done, and return it. This program ends if the command fails."""
    if (output / "summary.json").exists():
        return output
    log = output.with_suffix(".log")
    with log.open("w") as file:
        command = [sys.executable, "-m", "rl_megatron", "train", *arguments, f"output_dir={output}"]
        done = subprocess.run(command, stdout=file, stderr=file)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}; see {log}")
    return output


def last_checkpoint(output: Path, stage: str) -> Path:
    """Return the newest checkpoint of a stage of a run."""
    return max((output / "checkpoints" / stage).glob("step-*"))


def read(output: Path) -> Run:
    """Return what a run has learned, from its metrics."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    seconds = [each["time_step_s"] - each.get("time_evaluate_s", 0.0) for each in lines if each["kind"] == "train"]
    accuracies = {each["step"]: each["accuracy"] for each in lines if each["kind"] == "eval"}
    return Run(accuracies, statistics.median(seconds))


def results(
    directory: Path, teacher: Path, seeds: int, steps: int, overrides: Sequence[str]
) -> dict[str, list[Run]]:  # fmt: skip
    """Return the runs of each kind, after making those that are missing."""
    tokenizer = f"tokenizer.path={teacher / 'tokenizer'}"
    start = run(directory / "start", "experiment=quickstart", "~stages.grpo", *STUDENT, tokenizer, *overrides)
    shared = (
        *DISTILLATION, *ARITHMETIC, tokenizer, f"init_from={last_checkpoint(start, 'sft')}", f"train.steps={steps}",
        f"algorithm.teachers=[{{path: {last_checkpoint(teacher, 'grpo')}}}]",
        f"data.num_demonstrations={steps * SEQUENCES}",
    )  # fmt: skip
    found: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for seed in range(seeds):
        for kind, changes in KINDS.items():
            output = directory / f"{kind.replace(',', '').replace(' ', '-')}-{seed}"
            made = read(run(output, *changes[:1], *shared, *changes[1:], f"train.seed={seed}", *overrides))
            found[kind].append(made)
            print(f"seed {seed}, {kind}: {made.accuracies[max(made.accuracies)]:.4f}", flush=True)
    return found


def report(found: dict[str, list[Run]], teacher: float) -> list[str]:
    """Return the rows of a table: accuracies after several numbers of steps, and steps and seconds until `WITHIN`."""
    steps = sorted(next(iter(found.values()))[0].accuracies)
    shown = [step for step in steps if step % (5 * EVAL_EVERY) == 0 or step == steps[-1]]
    lines = [
        "| | " + " | ".join(map(str, shown)) + " | steps | seconds | reached |",
        "|---|" + "---:|" * (len(shown) + 3),
    ]
    for kind, runs in found.items():
        cells = [_mean([each.accuracies[step] for each in runs]) for step in shown]
        until = [(each.steps_until(teacher - WITHIN), each.step_seconds) for each in runs]
        reached = [(step, step * seconds) for step, seconds in until if step is not None]
        cells += [_mean([pair[index] for pair in reached], digits=0) if reached else "" for index in (0, 1)]
        lines.append(f"| {kind} | " + " | ".join(cells) + f" | {len(reached)} of {len(runs)} |")
    return lines


def _mean(values: Sequence[float], digits: int = 3) -> str:
    """Return the mean, with its standard error if there are several values."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.{digits}f}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("directory", type=Path, help="where the runs are kept")
    made.add_argument("--teacher", type=Path, help="a run of experiment=quickstart; it is made if this is not given")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--steps", type=int, default=300, help="steps of distillation")
    made.add_argument("overrides", nargs="*", help="overrides of all runs")
    return made


def main(arguments: list[str]) -> int:
    """Make the runs that are missing, and print the table."""
    given = parser().parse_args(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)
    teacher = given.teacher or run(given.directory / "teacher", "experiment=quickstart", *given.overrides)
    accuracy = json.loads((teacher / "summary.json").read_text())["accuracy"]["grpo"]
    found = results(given.directory, teacher, given.seeds, given.steps, given.overrides)
    print(f"The teacher's accuracy is {accuracy:.4f}.")
    for line in report(found, accuracy):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Measure how a student of half the width learns from a teacher on given answers, and on its own samples:

    python benchmarks/distillation.py outputs/quickstart [DIRECTORY]

The first directory is the run of `experiment=quickstart`, whose last model is the teacher. Three runs are written to
DIRECTORY (default outputs/distillation_benchmark): the student learns 300 steps on given answers from random weights
("start"), and goes on from there for 200 steps on given answers ("off-policy") and on its own samples ("on-policy").
All have the same loss over the whole vocabulary, learning rate and number of sequences in a step. The table has the
accuracy on held-out sums after each number of steps, and the mean time of a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

_STUDENT = (
    "model=nano", "model.hidden_size=64", "model.ffn_hidden_size=192", "model.init_std=0.08", "data=arithmetic",
    "data.task={name: arithmetic, operators: ['+'], max_operand: 99, zero_pad: true}", "data.num_demonstrations=8192",
    "data.num_eval_examples=400", "generation.max_new_tokens=5", "loss=full_distillation", "loss.kl_type=forward",
    "train.global_batch_size=128", "train.micro_batch_size=128", "device=cpu",
)  # fmt: skip
_GOES_ON = ("train.steps=200", "train.eval_every=20", "optimizer.lr=1e-3", "optimizer.min_lr=2e-4")


def last_checkpoint(run: Path, stage: str) -> Path:
    """Return the newest checkpoint of a stage of a run."""
    return max((run / "checkpoints" / stage).glob("step-*"))


def train(directory: Path, teacher: Path, tokenizer: Path, overrides: Sequence[str]) -> list[dict]:
    """Train a student in `directory`, unless that is done, and return the lines of its metrics."""
    places = (f"algorithm.teachers=[{{path: {teacher}}}]", f"tokenizer.path={tokenizer}", f"output_dir={directory}")
    subprocess.run([sys.executable, "-m", "rl_megatron", "train", *_STUDENT, *overrides, *places], check=True)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run the three trainings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path, help="the directory of the run of experiment=quickstart")
    parser.add_argument("directory", type=Path, nargs="?", default=Path("outputs/distillation_benchmark"))
    arguments = parser.parse_args()
    of_teacher = last_checkpoint(arguments.teacher, "grpo"), arguments.teacher / "tokenizer"
    start = arguments.directory / "start"
    schedule = ("train.steps=300", "train.eval_every=50", "optimizer.lr=2e-3", "optimizer.min_lr=1e-3")
    lines = {"start": train(start, *of_teacher, ("algorithm=distillation", *schedule, "optimizer.warmup_steps=20"))}
    goes_on = (*_GOES_ON, f"init_from={last_checkpoint(start, 'distillation')}")
    lines["off-policy"] = train(arguments.directory / "off_policy", *of_teacher, ("algorithm=distillation", *goes_on))
    lines["on-policy"] = train(
        arguments.directory / "on_policy", *of_teacher, ("algorithm=opd", "algorithm.prompts_per_step=128", *goes_on)
    )
    table = Table("run", "accuracy after steps", "seconds per step")
    for name, of_run in lines.items():
        accuracies = {line["step"]: line["accuracy"] for line in of_run if line["kind"] == "eval"}
        seconds = [line["time_step_s"] - line.get("time_evaluate_s", 0) for line in of_run if line["kind"] == "train"]
        reached = ", ".join(f"{step}: {accuracy:.3f}" for step, accuracy in accuracies.items())
        table.add_row(name, reached, f"{sum(seconds) / len(seconds):.3f}")
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

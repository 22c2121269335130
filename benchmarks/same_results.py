"""Compare the results of two checkouts of this repository: are the metrics of runs equal to the last bit?

Each run is started by its command in both checkouts, one after the other. The second checkout then also resumes from
the first one's checkpoint in the middle of the run, so old checkpoints have to load. All metrics but times and memory,
the samples, `config.yaml` and the names of files in the output directory are compared. The table also has the seconds
from the command to the end and to the first step, medians of all repetitions.

    git worktree add outputs/before v0.1.0
    python -m benchmarks.same_results outputs/before . --repeat 3

With --times, a second table has the median milliseconds of a step of each stage, and of the parts of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_megatron.config.metrics import METRICS_FILE, SAMPLES, is_cost

_TIME = re.compile(r"seconds|time_.*_s")
_SMALL = (
    "model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_attention_heads=4",
    "model.num_query_groups=2", "tokenizer.vocab_size=272",
)  # fmt: skip
_TINY = (
    *_SMALL, "model.max_sequence_length=48", "train.global_batch_size=16", "train.micro_batch_tokens=64",
    "train.steps=8", "train.save_every=4",
)  # fmt: skip
_ARITHMETIC = (
    "data.task.name=arithmetic", "data.num_documents=200", "data.num_demonstrations=64", "data.num_eval_examples=8",
    "data.sequence_length=16", "generation.max_new_tokens=4",
)  # fmt: skip
_SAMPLED = (*_TINY, *_ARITHMETIC, "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4")
_PAIRS = (*_TINY, "data=gsm8k_pairs", "data.path=../pairs.jsonl", "train.eval_every=4")


def _stages(**steps: int) -> tuple[str, ...]:
    """Return overrides that shorten stages, each with a checkpoint in its middle."""
    shorter = [
        (f"stages.{name}.train.steps={n}", f"stages.{name}.train.save_every={n // 2}") for name, n in steps.items()
    ]
    return tuple(override for pair in shorter for override in pair)


@dataclass(frozen=True)
class Run:
    """A run by its overrides.

    Attributes:
        overrides: What follows `train`. The last stage saves a checkpoint before its end.
        ranks: The number of processes.
    """

    overrides: tuple[str, ...]
    ranks: int = 1


RUNS = {
    "quickstart": Run(("experiment=quickstart",)),
    "quickstart, 2 ranks": Run(("experiment=quickstart", "parallel.tensor=2"), ranks=2),
    "GRPO": Run(
        ("algorithm=grpo", *_SAMPLED, "loss.reference_policy_kl_penalty=0.05", "algorithm.updates_per_rollout=2")
    ),
    "GRPO, experts": Run(
        (
            "model=nano_moe", "algorithm=grpo", *_SAMPLED, "model.expert_ffn_hidden_size=32",
            "model.shared_expert_ffn_hidden_size=32", "parallel.expert=2",
        ),
        ranks=2,
    ),  # fmt: skip
    "GRPO, pipeline": Run(("algorithm=grpo", *_SAMPLED, "parallel.pipeline=2", "model.num_layers=4"), ranks=2),
    "GRPO, context": Run(("algorithm=grpo", *_SAMPLED, "parallel.context=2"), ranks=2),
    "GRPO, data parallel": Run(("algorithm=grpo", *_SAMPLED, "train.micro_batch_tokens=128"), ranks=2),
    "age 0": Run(
        (
            "algorithm=grpo", *_SAMPLED, "rollout.async_enabled=true", "rollout.max_trajectory_age_steps=0",
            "generation.engine=transformers",
        ),
    ),  # fmt: skip
    "LoRA": Run(("experiment=quickstart_lora", *_stages(pretrain=20, sft=4, grpo=6))),
    "PPO": Run(("experiment=quickstart_ppo", *_stages(pretrain=20, sft=4, ppo=8))),
    "DPO": Run(("algorithm=dpo", "loss=dpo", *_PAIRS)),
    "DPO, 2 ranks": Run(("algorithm=dpo", "loss=dpo", *_PAIRS), ranks=2),
    "reward model": Run(("algorithm=reward_model", "loss=preference", *_PAIRS)),
    "KTO": Run(("algorithm=kto", "loss=kto", *_TINY, "data=files", "data.path=../answers.jsonl")),
    "online DPO": Run(("algorithm=online_dpo", "loss=dpo", *_SAMPLED)),
    "conversation": Run(("experiment=guessing_game", *_SMALL[:-1], *_stages(sft=20, grpo=6))),
    "tools": Run(("experiment=calculator_tool", *_SMALL[:-1], *_stages(sft=20, grpo=6))),
}  # fmt: skip


@dataclass
class Compared:
    """What the repetitions of a run have shown, by checkout."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    to_first_step: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    times: dict[str, dict[tuple[str, str], list[float]]] = field(default_factory=lambda: defaultdict(dict))
    num_values: int = 0
    differences: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Compare the runs, print the table, and return 1 if any result differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the checkout that says what is right")
    parser.add_argument("after", type=Path, help="the other checkout")
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN", help=f"of {', '.join(RUNS)}"
    )
    parser.add_argument("--repeat", type=int, default=1, help="how often each checkout starts each run")
    parser.add_argument("--times", action="store_true", help="print the times of steps and of their parts")
    parser.add_argument("--keep", type=Path, help="keep the output directories here")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of both checkouts")
    options = parser.parse_args(arguments)
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    table = Table("run", "values", "differ", "seconds", "to first step", title="before → after")
    times = Table("run", "stage", "time", "steps", "milliseconds", title="before → after")
    console, differs = Console(), False
    for checkout in checkouts.values():  # so that no run's time has the compilation
        command = [options.python, "-m", "compileall", "-q", "rl_megatron"]
        subprocess.run(command, cwd=checkout, env=_environment(checkout), check=True)
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.runs:
            directory = (options.keep or Path(temporary)) / name.replace(", ", "-").replace(" ", "-")
            console.print(f"{name} …", style="dim")
            found = compare(RUNS[name], checkouts, directory, options.python, options.repeat)
            for difference in found.differences:
                console.print(f"  {difference}", markup=False)
            differs = differs or bool(found.differences)
            table.add_row(
                name,
                str(found.num_values),
                str(len(found.differences)),
                _ratio(found.seconds),
                _ratio(found.to_first_step),
            )
            for stage, metric in sorted(found.times["before"].keys() & found.times["after"].keys()):
                both = {checkout: taken[stage, metric] for checkout, taken in found.times.items()}
                times.add_row(name, stage, metric, str(len(both["before"])), _ratio(both, scale=1000))
    console.print(table)
    if options.times:
        console.print(times)
    return int(differs)


def _ratio(seconds: dict[str, list[float]], scale: float = 1) -> str:
    before, after = (scale * statistics.median(seconds[name]) for name in ("before", "after"))
    return f"{before:.1f} → {after:.1f} ({after / before:.2f})"


def compare(run: Run, checkouts: dict[str, Path], directory: Path, python: str, repeat: int = 1) -> Compared:
    """Start a run in both checkouts, and compare what they write.

    Args:
        run: The run.
        checkouts: The directories of the checkouts "before" and "after".
        directory: Where the output directories are written; what it had is removed.
        python: The interpreter.
        repeat: How often each checkout starts the run.
    """
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    _write_data(directory)
    compared = Compared()
    for _ in range(repeat):
        for name, checkout in checkouts.items():
            output = directory / name / "out"
            shutil.rmtree(output.parent, ignore_errors=True)
            seconds, to_first_step = _start(run, checkout, output, python)
            compared.seconds[name].append(seconds)
            compared.to_first_step[name].append(to_first_step)
            for key, taken in _step_times(output).items():
                compared.times[name].setdefault(key, []).extend(taken)
    before, after = directory / "before" / "out", directory / "after" / "out"
    compared.num_values, compared.differences = _differences(before, after)
    resumed = directory / "resumed" / "out"
    shutil.copytree(before, resumed)
    (resumed / "summary.json").unlink()
    _forget_last_checkpoints(resumed)
    _start(run, checkouts["after"], resumed, python)
    num_values, differences = _differences(before, resumed, without="gate_")  # a first step has them
    compared.num_values += num_values
    compared.differences += [f"resumed: {difference}" for difference in differences]
    return compared


def _write_data(directory: Path) -> None:
    pairs = [{"question": f"Is {n} a number?", "chosen": f"yes, {n}.", "rejected": f"no, {n}."} for n in range(10, 60)]
    answers = [
        {"prompt": f"Is {n} a number?", "completion": f" {'yes' if n % 2 else 'no'}, {n}.", "label": n % 2 == 1}
        for n in range(10, 90)
    ]
    for name, records in (("pairs", pairs), ("answers", answers)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _start(run: Run, checkout: Path, output: Path, python: str) -> tuple[float, float]:
    """Run the command in the output directory's parent, and return the seconds to its end and to its first step."""
    output.parent.mkdir(parents=True, exist_ok=True)
    launcher = (
        ["torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks), "-m"] if run.ranks > 1 else []
    )
    command = [python, "-m", *launcher, "rl_megatron", "train", *run.overrides, "device=cpu", "output_dir=out"]
    began, first_step = time.monotonic(), None
    with (output.parent / "output.txt").open("ab") as said:
        process = subprocess.Popen(
            command, cwd=output.parent, env=_environment(checkout), stdout=said, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            if first_step is None and _has_step(output / METRICS_FILE):
                first_step = time.monotonic() - began
            time.sleep(0.02)
    seconds = time.monotonic() - began
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with status {process.returncode}; see {output.parent}/output.txt")
    return seconds, seconds if first_step is None else first_step


def _environment(checkout: Path) -> dict[str, str]:
    """Return the environment in which a checkout's package is imported, and compiled files lie beside their sources."""
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPYCACHE", "PYTHONDONTWRITE"))
    }
    return ours | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}


def _has_step(metrics: Path) -> bool:
    return metrics.exists() and b'"train"' in metrics.read_bytes()


def _step_times(output: Path) -> dict[tuple[str, str], list[float]]:
    """Return the times that training steps have taken, by stage and metric, without the first step of each stage."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in map(json.loads, (output / METRICS_FILE).read_text().splitlines()):
        if line["kind"] == "train" and line["step"] > 1:
            for metric, value in line.items():
                if _TIME.fullmatch(metric):
                    times[line["stage"], metric].append(value)
    return times


def _forget_last_checkpoints(output: Path) -> None:
    """Remove the last checkpoint of the last stage and of its critic."""
    newest = max((output / "checkpoints").glob("*/step-*"), key=lambda path: path.stat().st_mtime)
    for path in (output / "checkpoints").glob(f"{newest.parent.name}*/{newest.name}"):
        shutil.rmtree(path)


def _differences(before: Path, after: Path, without: str | None = None) -> tuple[int, list[str]]:
    """Return the number of compared values, and a line for each that differs.

    Args:
        before: An output directory.
        after: Another one.
        without: The beginning of names that are not compared.
    """
    num_values, differences = 0, []
    names = [sorted(_files(output)) for output in (before, after)]
    if names[0] != names[1]:
        differences.append(f"files: only one has {sorted(set(names[0]) ^ set(names[1]))}")
    if (before / "config.yaml").read_bytes() != (after / "config.yaml").read_bytes():
        differences.append("config.yaml")
    for file in (METRICS_FILE, SAMPLES):
        if not (before / file).exists():
            continue
        lines = [[json.loads(line) for line in (output / file).read_text().splitlines()] for output in (before, after)]
        if len(lines[0]) != len(lines[1]):
            differences.append(f"{file}: {len(lines[0])} and {len(lines[1])} lines")
        for old, new in zip(*lines, strict=False):
            for key in sorted(old.keys() | new.keys()):
                if is_cost(key) or (without is not None and key.startswith(without)):
                    continue
                num_values += 1
                if json.dumps(old.get(key)) != json.dumps(new.get(key)):  # NaN equals NaN
                    where = f"{old.get('stage')} step {old.get('step')}"
                    differences.append(f"{file}: {where}: {key} is {old.get(key)} and {new.get(key)}")
    return num_values, differences


def _files(output: Path) -> Iterator[str]:
    for path in output.rglob("*"):
        name = str(path.relative_to(output))
        if path.is_file() and not name.startswith("tensorboard"):  # their names have the time and the process
            yield name


if __name__ == "__main__":
    sys.exit(main())

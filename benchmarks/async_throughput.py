"""Race asynchronous GRPO against synchronous GRPO, with a generation that takes as long as training.

    python -m benchmarks.async_throughput outputs/async_throughput

Trajectories wait before they are completed, as if generation took that long. A first run without a wait says how long
all that is not generation takes in a step, and the wait is set to it. Then runs of both kinds take turns. It prints the
median time of a step of each kind, their ratio, and the share of time in which training waits for trajectories. The
first steps of a run, which start the engine and fill the queue, are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.async_learning import run

WORKER = """
import asyncio


async def wait_and_complete(client, record, sampling, seconds):
    await asyncio.sleep(seconds)
    history = client.history()
    await history.complete(sampling)
    return [history.trajectory()]
"""
COMMON = (
    "train", "algorithm=grpo", "data=arithmetic", "model=nano", "generation.engine=transformers", "resume=false",
    "algorithm.prompts_per_step=32", "algorithm.samples_per_prompt=8", "train.global_batch_size=256",
    "generation.max_new_tokens=4", "train.eval_every=0", "data.num_eval_examples=8", "optimizer.lr=1e-12",
    "algorithm.updates_per_rollout=4", "train.equal_rewards_steps=1000", "loss.reference_policy_kl_penalty=0.0",
)  # fmt: skip
FIRST = 3  # steps that are left out
KINDS = {
    "synchronous": (),
    "asynchronous": ("rollout.async_enabled=true", "rollout.max_trajectory_age_steps=1"),
}


def steps_of(output: Path) -> list[dict[str, float]]:
    """Return the training lines of a run, without the first steps."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"][FIRST:]


def measured(
    directory: Path, steps: int, wait: float, changes: Sequence[str], overrides: Sequence[str]
) -> list[dict[str, float]]:
    """Return the training lines of a new run whose trajectories wait so many seconds."""
    output, worker = directory / "run", directory / "worker.py"
    worker.write_text(WORKER)
    shutil.rmtree(output, ignore_errors=True)
    run(
        *COMMON, f"train.steps={steps + FIRST}", f"rollout.worker={worker}:wait_and_complete", f"output_dir={output}",
        f"rollout.worker_kwargs={{seconds: {wait:.3f}}}", *changes, *overrides, log=directory / "run.log",
    )  # fmt: skip
    return steps_of(output)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("directory", type=Path, help="where the runs are made")
    made.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    made.add_argument("--steps", type=int, default=12, help="steps of a run that are measured")
    made.add_argument("overrides", nargs="*", help="overrides of all runs")
    return made


def main(arguments: list[str]) -> int:
    """Make the runs, and print what they took."""
    given = parser().parse_args(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)

    alone = measured(given.directory, given.steps, 0.0, (), given.overrides)
    wait = statistics.median(
        line["time_step_s"] - line["time_generate_s"] - line["time_environment_s"] for line in alone
    )
    print(f"without generation, a step takes {wait:.2f} s")
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(given.rounds):
        for kind, changes in KINDS.items():
            found[kind] += measured(given.directory, given.steps, wait, changes, given.overrides)
    medians = {kind: statistics.median(line["time_step_s"] for line in lines) for kind, lines in found.items()}
    for kind, seconds in medians.items():
        print(f"{kind}: {seconds:.2f} s per step, median of {len(found[kind])}")
    idle = statistics.median(line["trainer_idle"] for line in found["asynchronous"])
    ratio = medians["synchronous"] / medians["asynchronous"]
    print(f"throughput ratio {ratio:.2f}; training waits {idle:.1%} of the time")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

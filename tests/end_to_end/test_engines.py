"""GRPO with a rollout engine in a process of its own: the engine is killed, or the logprob check stops the run."""

import io
import os
import signal
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest

import rl_megatron.algorithms.metrics  # noqa: F401  # declares all of them
from rl_megatron.config.metrics import EVAL_METRICS, METRICS, is_cost
from tests.end_to_end.launch import TINY, metrics
from tests.forked_engines import is_engine

STEPS = 10  # enough that the engine can be killed after the first step and before the end of the last
GRPO = (
    *TINY, "algorithm=grpo", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4", f"train.steps={STEPS}",
)  # fmt: skip
ENGINE = ("generation.engine=transformers", "generation.refit_bucket_mb=0.05")


def results_of(directory: Path) -> list[dict]:
    """Return the metrics of every step and of the logprob checks, without times and rates."""
    lines = metrics(directory, timed=True)
    return [{key: value for key, value in line.items() if not is_cost(key)} for line in lines]


def engines(directory: Path) -> list[int]:
    """Return the process ids of the engines of the run in `directory`, whichever process is their parent now."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and is_engine(int(entry.name)):
                found += [int(entry.name)] * (os.readlink(entry / "cwd") == str(directory))
        except (FileNotFoundError, ProcessLookupError):
            pass  # it ended meanwhile
    return found


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, forks):
    directory = tmp_path_factory.mktemp("undisturbed")
    done = forks.run(directory, "train", *GRPO, *ENGINE)
    assert done.status == 0, done.err
    return directory / "out"


def test_every_step_syncs_weights_and_passes_the_logprob_check(undisturbed):
    lines = metrics(undisturbed, timed=True)
    # Every training step changes the weights; the next step or evaluation sends them to the engine.
    refits = [(line["kind"], line["step"]) for line in lines if "refit_bytes" in line]
    assert refits == [("eval", 0), *(("train", step) for step in range(2, STEPS + 1)), ("eval", STEPS)]
    for line in lines:
        if "refit_bytes" in line:
            assert line["refit_seconds"] > 0 and line["refit_gb_per_s"] > 0
            assert 0 <= line["gate_mean"] <= line["gate_p99"] <= line["gate_max"] < 1e-5
    assert all(line["mismatch_max"] < 1e-5 for line in lines if line["kind"] == "train")


def test_every_metric_that_a_run_writes_is_declared(undisturbed):
    lines = metrics(undisturbed, timed=True)
    assert {line["kind"] for line in lines} == {"train", "eval"}
    for line in lines:
        declared = METRICS.keys() | (EVAL_METRICS.keys() if line["kind"] == "eval" else set())
        assert line.keys() - {"stage", "step", "kind", "seconds"} <= declared


def test_a_killed_engine_is_restarted_and_the_run_is_unchanged(tmp_path, undisturbed, forks):
    with forks.start(tmp_path, "train", *GRPO, *ENGINE) as running:
        running.wait_until(lambda: any(line["kind"] == "train" for line in metrics(tmp_path / "out")), "first step")
        (engine,) = engines(tmp_path)
        os.kill(engine, signal.SIGKILL)
        done = running.finish()
    assert done.status == 0, done.err
    assert done.err.count("was killed by SIGKILL; starting the engines again (1 of at most 3 times)") == 1, done.err
    assert results_of(tmp_path / "out") == results_of(undisturbed)
    assert engines(tmp_path) == []


def test_an_engine_ends_if_its_run_is_killed(tmp_path, forks):
    with forks.start(tmp_path, "train", *GRPO, *ENGINE, "train.steps=1000") as running:
        running.wait_until(lambda: len(metrics(tmp_path / "out")) > 1, "first step")
        assert engines(tmp_path)
        os.kill(running.pids[0], signal.SIGKILL)
        wait_until(lambda: engines(tmp_path) == [], seconds=10)


def test_the_logprob_check_stops_the_run_before_the_first_update(tmp_path, forks):
    done = forks.run(tmp_path, "train", *GRPO, *ENGINE, "generation.gate_limit=1e-12")
    assert done.status == 1
    line = done.err.splitlines()[-1]
    assert line.startswith("error: the rollout engine's logprobs differ from the trainer's")
    assert "generation.gate_limit=1e-12" in line and "worst: prompt '" in line and "no checkpoint yet" in line
    assert metrics(tmp_path / "out") == []


def run_with_a_dropped_tensor(tensor: str, directory: Path) -> tuple[int, str, int]:
    """Run GRPO on a rank whose refits leave one tensor at zero in its bucket.

    Returns:
        The exit status, the standard error, and how often the engine was asked for completions.
    """
    from rl_megatron.config.loading.load import load_config
    from rl_megatron.generation.transformers.engine import TransformersEngine
    from rl_megatron.runs.run import run
    from rl_megatron.weight_sync.exporter import WeightExporter

    fill, complete, calls, stderr = WeightExporter.fill, TransformersEngine.complete, [], io.StringIO()

    def fill_without(self, bucket_index, buffer):
        filled, bucket = fill(self, bucket_index, buffer), self.plan.buckets[bucket_index]
        for index, spec in enumerate(bucket.tensors):
            if spec.name == tensor:
                bucket.tensor(filled, index).zero_()
        return filled

    WeightExporter.fill = fill_without
    TransformersEngine.complete = lambda *arguments: calls.append(arguments) or complete(*arguments)
    try:
        with redirect_stderr(stderr):
            status = run(load_config([*GRPO, *ENGINE, "parallel.tensor=2", f"output_dir={directory}"]))
    finally:
        WeightExporter.fill, TransformersEngine.complete = fill, complete
    return status, stderr.getvalue(), len(calls)


def test_a_dropped_tensor_stops_the_run_before_anything_is_generated(tmp_path, ranks):
    first, second = ranks.run(2, run_with_a_dropped_tensor, "model.layers.0.mlp.down_proj.weight", tmp_path / "out")
    for status, _, calls in (first, second):
        assert (status, calls) == (1, 0)
    (line,) = [line for line in first[1].splitlines() if line.startswith("error: ")]  # libraries may write warnings
    assert "rollout engine 0" in line and "model.layers.0.mlp.down_proj.weight" in line
    assert "no checkpoint yet" in line and "error: " not in second[1]
    assert metrics(tmp_path / "out") == []

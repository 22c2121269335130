"""GRPO with a rollout engine in a process of its own: killed in mid-run, stopped by the logprob check."""

import io
import os
import signal
import time
from contextlib import redirect_stderr
from pathlib import Path

import pytest

import rl_megatron.algorithms.metrics  # noqa: F401  # declares all of them
from rl_megatron.config.eval_metrics import EVAL_METRICS
from rl_megatron.config.metrics import METRICS
from tests.end_to_end.launch import TINY, metrics

STEPS = 10  # the first of which has to be seen, and the engine killed, before the last is over
GRPO = (
    *TINY, "algorithm=grpo", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4", f"train.steps={STEPS}",
)  # fmt: skip
ENGINE = ("generation.engine=transformers", "generation.refit_bucket_mb=0.05")


def learnt(directory: Path) -> list[dict]:
    """Return what every step saw and did, and what the logprob check found."""
    lines = metrics(directory, timed=True)
    return [
        {key: value for key, value in line.items() if "seconds" not in key and "per_s" not in key} for line in lines
    ]


WORKER = b"rl_megatron.generation.transformers.worker"


def engines(directory: Path) -> list[int]:
    """The processes of the engines of the run in `directory`, whoever their parent is by now."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and WORKER in (entry / "cmdline").read_bytes():
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
    # Weights change in every training step, and are asked for by what comes next: a step's prompts, or an evaluation.
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


def test_an_engine_killed_in_mid_run_is_survived_bitwise(tmp_path, undisturbed, forks):
    with forks.start(tmp_path, "train", *GRPO, *ENGINE) as running:
        running.wait_until(lambda: any(line["kind"] == "train" for line in metrics(tmp_path / "out")), "first step")
        (engine,) = engines(tmp_path)
        os.kill(engine, signal.SIGKILL)
        done = running.finish()
    assert done.status == 0, done.err
    assert done.err.count("was killed by SIGKILL; starting the engines again (1 of at most 3 times)") == 1, done.err
    assert learnt(tmp_path / "out") == learnt(undisturbed)
    assert engines(tmp_path) == []


def test_an_engine_ends_with_a_run_that_is_killed(tmp_path, forks):
    with forks.start(tmp_path, "train", *GRPO, *ENGINE, "train.steps=1000") as running:
        running.wait_until(lambda: len(metrics(tmp_path / "out")) > 1, "first step")
        assert engines(tmp_path)
        os.kill(running.pids[0], signal.SIGKILL)
        wait_until(lambda: engines(tmp_path) == [], seconds=10)


def test_the_logprob_check_halts_the_run_before_it_learns(tmp_path, forks):
    done = forks.run(tmp_path, "train", *GRPO, *ENGINE, "generation.gate_limit=1e-12")
    assert done.status == 1
    line = done.err.splitlines()[-1]
    assert line.startswith("error: the rollout engine's logprobs differ from the trainer's")
    assert "generation.gate_limit=1e-12" in line and "worst: prompt '" in line and "no checkpoint yet" in line
    assert metrics(tmp_path / "out") == []


def run_that_loses(tensor: str, directory: Path) -> tuple[int, str, int]:
    """On a rank: (exit status, what it said, how often completions were asked for) of a run whose refits drop a tensor
    between the model and the wire."""
    from rl_megatron.algorithms.run import run
    from rl_megatron.config.load import load_config
    from rl_megatron.generation.transformers.engine import TransformersEngine
    from rl_megatron.weight_sync.exporter import WeightExporter

    fill, draw, asked, said = WeightExporter.fill, TransformersEngine.generate, [], io.StringIO()

    def forgetful(self, bucket_index, buffer):
        filled, bucket = fill(self, bucket_index, buffer), self.plan.buckets[bucket_index]
        for index, spec in enumerate(bucket.tensors):
            if spec.name == tensor:
                bucket.tensor(filled, index).zero_()
        return filled

    WeightExporter.fill = forgetful
    TransformersEngine.generate = lambda *arguments: asked.append(arguments) or draw(*arguments)
    try:
        with redirect_stderr(said):
            status = run(load_config([*GRPO, *ENGINE, "parallel.tensor=2", f"output_dir={directory}"]))
    finally:
        WeightExporter.fill, TransformersEngine.generate = fill, draw
    return status, said.getvalue(), len(asked)


def test_a_dropped_tensor_halts_the_run_before_anything_is_generated(tmp_path, ranks):
    first, second = ranks.run(2, run_that_loses, "model.layers.0.mlp.down_proj.weight", tmp_path / "out")
    for status, _, asked in (first, second):
        assert (status, asked) == (1, 0)
    (line,) = [line for line in first[1].splitlines() if line.startswith("error: ")]  # warnings of libraries aside
    assert "rollout engine 0" in line and "model.layers.0.mlp.down_proj.weight" in line
    assert "no checkpoint yet" in line and "error: " not in second[1]
    assert metrics(tmp_path / "out") == []

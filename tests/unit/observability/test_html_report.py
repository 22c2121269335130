"""Pages of runs: their state, their failure, their charts, and what differs between runs."""

import json
import re
import subprocess
import sys

import pytest

from rl_megatron import log
from rl_megatron.config.loading.load import load_config, to_yaml
from rl_megatron.observability.curves import smooth
from rl_megatron.observability.failures import Attempts
from rl_megatron.observability.html_report import render_comparison, render_report
from rl_megatron.observability.run_files import RecordedRun

LINE = {"stage": "sft", "kind": "train", "time_step_s": 3.0, "time_train_s": 2.0, "time_other_s": 1.0}


def written(directory, lr=0.5, steps=3, **files):
    """Write the files of a run, and read them."""
    directory.mkdir()
    (directory / "config.yaml").write_text(to_yaml(load_config(["algorithm=sft", f"optimizer.lr={lr}"])))
    lines = [LINE | {"step": step, "loss": 1 / step, "grad_norm": float("nan")} for step in range(1, steps + 1)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"stage": "s')
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(json.dumps(content) + "\n")
    return RecordedRun.read(directory)


def test_a_run_that_goes_on_has_a_page(tmp_path):
    run = written(tmp_path / "mine")
    page = render_report(run)
    assert run.state == "running" and "<dd>running</dd>" in page and "sft 3 of 100" in page
    assert page.count("<svg") == 2  # the loss, and the times of the step
    assert "<td>optimizer.lr</td><td>0.001</td><td>0.5</td>" in page
    assert "<td>train</td><td>2.000</td><td>66.7%</td>" in page


def test_a_failure_is_on_the_page_and_nothing_is_executed(tmp_path):
    failure = {"kind": "error", "rank": 1, "stage": "sft", "step": 3, "phase": "train", "message": "a <script> failed"}
    sample = {"prompt": "<b>", "completion": "c", "answer": "a", "reward": 0.5}
    samples = {"stage": "sft", "step": 2, "samples": [sample]}
    run = written(tmp_path / "mine", failure__json=failure, samples__jsonl=samples)
    page = render_report(run)
    assert run.state == "failed" and "rank 1, stage sft, step 3, phase train" in page
    assert "a &lt;script&gt; failed" in page and "<script" not in page and "&lt;b&gt;" in page


@pytest.mark.parametrize(
    ("summary", "state"), [({"stages": {}}, "complete"), ({"stopped": {}}, "stopped, and can continue")]
)
def test_an_end_is_told_by_the_summary(tmp_path, summary, state):
    assert written(tmp_path / "mine", summary__json=summary).state == state


def test_starts_of_a_run_are_told_with_their_ends(tmp_path):
    for how in ("killed", "failed", "complete"):
        attempts = Attempts(tmp_path)
        attempts.end("failed")  # before it has begun, the directory may be another run's
        attempts.begin(f"2 ranks, {how}")
        if how != "killed":
            attempts.end(how, "stage sft, step 3")
    run = written(tmp_path / "mine")
    (tmp_path / "attempts.jsonl").rename(run.directory / "attempts.jsonl")
    page = render_report(RecordedRun.read(run.directory))
    ends = re.findall(r"<td>2 ranks, (\w+)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", page)
    assert [(how, told, place) for how, _, told, place in ends] == [
        ("killed", "was killed", ""),
        ("failed", "failed", "stage sft, step 3"),
        ("complete", "complete", "stage sft, step 3"),
    ]


def test_an_end_that_cannot_be_recorded_is_said_only(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(log.LOGGER, "warning", lambda text, *args: said.append(text % args))
    attempts = Attempts(tmp_path)
    attempts.begin("1 rank")
    (tmp_path / "attempts.jsonl").unlink()
    (tmp_path / "attempts.jsonl").mkdir()
    attempts.end("failed")
    assert "the end of the run cannot be recorded" in said[0]


def test_runs_are_compared(tmp_path):
    runs = [written(tmp_path / "a"), written(tmp_path / "b", lr=0.25)]
    page = render_comparison(runs)
    assert "<td>stages.sft.optimizer.lr</td><td>0.5</td><td>0.25</td>" in page
    assert page.count("optimizer.") == 1 and "<svg" in page


def test_the_commands_draw_what_a_run_recorded_without_importing_it(tmp_path):
    """A process of its own, because this one may have imported what declares metrics."""
    for name in ("a", "b"):
        written(tmp_path / name)
    command = [sys.executable, "-m", "rl_megatron", "compare", "a", "b", "--output", "both.html"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
    page = (tmp_path / "both.html").read_text()
    assert page.index("Learning") < page.index(">loss<") < page.index("Speed") < page.index(">time_step_s<")


def test_smoothing_keeps_constants_and_ends():
    assert smooth([2.0] * 30) == [2.0] * 30
    assert smooth([0.0, 3.0, 0.0]) == [1.5, 1.0, 1.5]

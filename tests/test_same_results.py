"""Comparing the results of two checkouts finds every difference but those of times, and leaves out nothing."""

from __future__ import annotations

import sys

import pytest

from benchmarks import same_results
from rl_megatron.config.loading.load import load_config

# It stands for Python: it writes the results of a run of four steps, which a file of the checkout changes. A run that
# finds a checkpoint continues from it.
PROGRAM = """#!{python}
import json, os, pathlib, sys
if "compileall" in sys.argv:
    sys.exit()
checkout = pathlib.Path(os.environ["PYTHONPATH"])
changes = json.loads((checkout / "changes.json").read_text())
out = pathlib.Path("out")
old = out / "metrics.jsonl"
first = 2 if (out / "checkpoints/grpo/step-000002").exists() else 0
lines = old.read_text().splitlines()[:first] if old.exists() else []
for step in range(first + 1, 5):
    line = {{"stage": "grpo", "kind": "train", "step": step, "loss": step / 4, "grad_norm": float("nan")}}
    line["seconds"] = changes.get("seconds", 1) if step > 1 else os.getpid()
    if first:
        line["gate_max"] = 1e-7
    lines.append(json.dumps(line | (changes.get("step", {{}}) if step == 4 else {{}})))
    if step % 2 == 0:
        (out / f"checkpoints/grpo/step-{{step:06d}}").mkdir(parents=True)
old.write_text(chr(10).join(lines))
(out / "config.yaml").write_text(changes.get("config", "a: 1"))
for name in ("summary.json", *changes.get("files", ())):
    (out / name).write_text("{{}}")
"""
RUN = same_results.Run(())


@pytest.fixture
def checkouts(tmp_path):
    """Return two equal checkouts and the program that stands for Python."""
    program = tmp_path / "python"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    for name in ("before", "after"):
        (tmp_path / name / "rl_megatron").mkdir(parents=True)
        (tmp_path / name / "changes.json").write_text("{}")
    return tmp_path


def compared(checkouts, changes=None):
    if changes is not None:
        (checkouts / "after" / "changes.json").write_text(changes)
    both = {name: checkouts / name for name in ("before", "after")}
    return same_results.compare(RUN, both, checkouts / "runs", str(checkouts / "python"))


def test_equal_checkouts_have_no_difference_and_resume_in_the_middle(checkouts):
    found = compared(checkouts)
    assert found.differences == [] and found.num_values == 2 * 4 * 5
    assert (checkouts / "runs/resumed/out/metrics.jsonl").read_text().count("gate_max") == 2


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ('{"step": {"loss": 1.0000000000000002}}', "metrics.jsonl: grpo step 4: loss is 1.0 and 1.0000000000000002"),
        ('{"step": {"new": 1}}', "metrics.jsonl: grpo step 4: new is None and 1"),
        ('{"config": "a: 2"}', "config.yaml"),
        ('{"files": ["other.txt"]}', "files: only one has ['other.txt']"),
    ],
)  # fmt: skip
def test_a_difference_is_reported_of_the_whole_run_and_of_the_resumed_one(checkouts, changes, difference):
    assert compared(checkouts, changes).differences == [difference, f"resumed: {difference}"]


def test_the_command_returns_whether_results_differ(checkouts, capsys, monkeypatch):
    monkeypatch.setattr(same_results, "RUNS", {"short": RUN})
    command = [str(checkouts / "before"), str(checkouts / "after"), "--python", str(checkouts / "python")]
    assert same_results.main([*command, "--runs", "short", "--repeat", "2"]) == 0
    (checkouts / "after" / "changes.json").write_text('{"config": "a: 2", "seconds": 3}')
    assert same_results.main([*command, "--runs", "short", "--times"]) == 1
    printed = capsys.readouterr().out
    assert "resumed: config.yaml" in printed
    assert "1000.0 → 3000.0 (3.00)" in printed  # the first step of a stage does not count


@pytest.mark.parametrize("name", same_results.RUNS)
def test_the_runs_are_valid_and_save_a_checkpoint_before_the_last(name):
    config = load_config([*same_results.RUNS[name].overrides, "device=cpu"])
    last = list(config.stages.values())[-1]
    assert 0 < last.train.save_every < last.train.steps

"""Mistakes in paths and files are answered before torch, megatron-core and transformers are imported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rl_megatron.checkpoint.directory import publish
from rl_megatron.cli import main
from rl_megatron.cli.early_checks import check_early, check_layout
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config, to_yaml
from rl_megatron.runs.rerun import refuse_changes
from tests.unit.cli.early_cases import CASES

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a fresh process answers to each of the cases."""
    command = [sys.executable, "-m", "tests.unit.cli.early_cases", str(tmp_path_factory.mktemp("early"))]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_answered_in_one_line_without_heavy_imports(answers, name):
    status, line = answers[name]
    assert status == 2
    assert re.fullmatch(r"error: [^\n]+\n", line), line
    assert re.search(CASES[name][1], line), line


def test_several_ranks_leave_the_import_of_reward_functions_to_the_preflight(tmp_path, monkeypatch):
    """Every rank would run the user's file, and they agree on an error only in the preflight."""
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('.')\ndef f(completion): return 1\n")
    given = ["data=arithmetic", "algorithm=grpo", f"output_dir={tmp_path / 'out'}"]
    config = load_config([*given, f"reward.functions=[{{name: '{tmp_path}/mine.py:f'}}]"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_early(config)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_early(config)
    assert (tmp_path / "ran").read_text() == "."
    monkeypatch.setenv("WORLD_SIZE", "2")
    unknown = load_config([*given, "reward.functions=[{name: exact_mach}]"])
    with pytest.raises(ConfigError, match="there is no reward function of this name"):
        check_early(unknown)


def test_an_evaluation_that_leaves_no_problem_to_train_on_is_answered_in_one_line(tmp_path, capsys):
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(40)))
    rewarded = ("algorithm=grpo", f"data.path={file}", "reward.functions=[exact_match]")
    assert main(["train", *rewarded, "data.num_eval_examples=100", f"output_dir={tmp_path / 'out'}"]) == 2
    rule = f"data.num_eval_examples=100 leaves nothing to train on: {file} has 40 records; lower it, "
    assert f"error: {rule}" in capsys.readouterr().err.splitlines()[-1]


def test_the_layout_is_checked_against_the_ranks_of_the_launcher(monkeypatch):
    config = load_config(["data=arithmetic", "parallel.tensor=2"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_layout(config)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="parallel.tensor=2 .* does not divide the world size 3"):
        check_layout(config)
    with pytest.raises(ConfigError, match="parallel.tensor=3 must divide model.num_attention_heads=4"):
        check_layout(load_config(["data=arithmetic", "parallel.tensor=3"]))


def test_commands_that_do_not_train_may_differ_from_the_run_in_output_dir(tmp_path):
    """For certify and show-batch, the settings of a run that exists are no rule; `train` checks them besides."""
    given = ["data=arithmetic", f"output_dir={tmp_path}"]
    (tmp_path / "partial").mkdir()
    (tmp_path / "checkpoints" / "sft").mkdir(parents=True)
    publish(tmp_path / "partial", tmp_path / "checkpoints" / "sft" / "step-000001", {"step": 1})
    (tmp_path / "config.yaml").write_text(to_yaml(load_config(given)))
    other = load_config([*given, "train.seed=7"])
    check_early(other)
    with pytest.raises(ConfigError, match="train.seed: 0 → 7"):
        refuse_changes(other)

"""The shipped experiments with several turns: the commands of their page run shortened."""

from __future__ import annotations

import pytest

from tests.end_to_end.launch import metrics
from tests.end_to_end.page_commands import commands, run
from tests.forkserver import REPOSITORY

PAGE = REPOSITORY / "docs" / "tutorials" / "multi_turn.md"
COMMANDS = commands(PAGE.read_text())
SHORT = (
    "model.num_layers=1 data.num_documents=200 data.num_demonstrations=64 data.num_eval_examples=4 "
    "stages.sft.train.steps=2 stages.grpo.train.steps=2 stages.grpo.algorithm.prompts_per_step=2 "
    "stages.grpo.algorithm.samples_per_prompt=4 stages.grpo.train.global_batch_size=8"
)


def of_stage(directory, stage, kind):
    return [line for line in metrics(directory) if (line["stage"], line["kind"]) == (stage, kind)]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_run_both_stages(command, tmp_path, forks):
    done = run(f"{command} {SHORT} output_dir=out", tmp_path, forks)
    assert done.status == 0, done
    steps = of_stage(tmp_path / "out", "grpo", "train")
    assert [line["step"] for line in steps] == [1, 2] and len(of_stage(tmp_path / "out", "sft", "train")) == 2
    for line in (*steps, *of_stage(tmp_path / "out", "grpo", "eval")):
        assert line["turns"] >= 1 and line["segments"] == 1 and line["failed_trajectories"] == 0
        assert ("tool_calls" in line) == ("calculator" in command and "functions: []" not in command)
    assert all(line["mismatch_max"] < 1e-4 for line in steps)


def test_the_page_shows_every_experiment_with_its_settings():
    page = PAGE.read_text()
    for name in ("calculator_tool", "guessing_game", "text_world"):
        assert any(f"experiment={name}" in command for command in COMMANDS)
        assert f"configs/experiment/{name}.yaml" in page

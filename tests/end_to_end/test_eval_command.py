"""Named sets in a run, and `rl-megatron eval`: the same numbers in any layout, also after the command was killed."""

import json
import re

import pytest

from benchmarks import eval_layouts
from tests.end_to_end.launch import metrics, train_and_export, trained_checkpoint

SETS = (
    "eval.sets=[{name: sums, task: arithmetic, num_problems: 6, n: 4, max_new_tokens: 4, every: 2}, "
    "{name: greedy, task: arithmetic, num_problems: 5, temperature: 0}]"
)


SAMPLING = (SETS, "generation.max_new_tokens=4")  # as in the run, whose number it is too


@pytest.fixture(scope="module")
def home(tmp_path_factory, forks):
    """A directory with a run in out/ that was evaluated on two sets, and its weights for Hugging Face in exported/."""
    return train_and_export(forks, tmp_path_factory.mktemp("trained"), SETS)


def evaluated(forks, directory, weights, *arguments, ranks=1):
    """Run the command, and return the metrics that it wrote."""
    command = ("eval", str(weights), *SAMPLING, "--output", "results", *arguments)
    finished = forks.run_ranks(directory, *command, ranks=ranks)
    assert [rank.status for rank in finished] == [0] * ranks, finished[0].err
    return json.loads((directory / "results" / "metrics.json").read_text())


def test_a_run_evaluates_each_set_when_it_is_due_and_compares_it_with_the_start(home):
    lines = [line for line in metrics(home / "out") if line["kind"] == "eval"]
    assert [line["step"] for line in lines if "sums/avg@4" in line] == [0, 2, 3]
    assert [line["step"] for line in lines if "greedy/avg@1" in line] == [0, 3]
    assert "sums/length_change_p" in lines[-1] and "sums/length_change" not in lines[0]
    assert lines[-1]["sums/length"] == pytest.approx(lines[0]["sums/length"] + lines[-1]["sums/length_change"])
    files = sorted(path.name for path in (home / "out" / "evaluations" / "sft" / "sums").iterdir())
    assert files == [f"step-{step:06}.parquet" for step in (0, 2, 3)]


@pytest.fixture(scope="module")
def alone(home, tmp_path_factory, forks):
    """The directory in which the command evaluated the run's last checkpoint."""
    directory = tmp_path_factory.mktemp("alone")
    evaluated(forks, directory, trained_checkpoint(home))
    return directory


def test_the_command_gives_the_numbers_of_the_run(home, alone):
    found = json.loads((alone / "results" / "metrics.json").read_text())
    last = [line for line in metrics(home / "out") if line["kind"] == "eval"][-1]
    assert found == {name: last[name] for name in found} and "sums/maj@4" in found


def test_another_layout_and_a_hugging_face_directory_give_the_same(home, alone, tmp_path, forks):
    for name, weights, arguments, ranks in (
        ("tensor", trained_checkpoint(home), ("parallel.tensor=2",), 2),
        ("data", home / "exported", ("generation.batch_size=2",), 2),
    ):
        (tmp_path / name).mkdir()
        evaluated(forks, tmp_path / name, weights, *arguments, ranks=ranks)
        for file in ("metrics.json", "sums.jsonl", "greedy.jsonl"):
            assert (tmp_path / name / "results" / file).read_bytes() == (alone / "results" / file).read_bytes()


@pytest.mark.change
def test_tokens_of_three_layouts_are_compared(home, capsys):
    assert eval_layouts.main([str(trained_checkpoint(home)), "--problems", "5", "--samples", "2", "--tokens", "4"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"10 completions of \d+ tokens, \d+ of them within 1e-05 of a boundary", printed)
    assert "tensor 2: 0 completions differ" in printed and "data 2: 0 completions differ" in printed


def test_a_killed_command_goes_on_and_an_evaluation_is_compared_with_another(home, alone, tmp_path, forks):
    evaluated(forks, tmp_path, trained_checkpoint(home))
    file = tmp_path / "results" / "sums.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "results" / "greedy.jsonl").unlink()
    found = evaluated(forks, tmp_path, trained_checkpoint(home), "--baseline", str(alone / "results"))
    assert file.read_bytes() == whole == (alone / "results" / "sums.jsonl").read_bytes()
    assert found["sums/length_change"] == 0 and found["sums/length_change_p"] == 1


def test_results_of_other_weights_are_refused(home, alone, tmp_path, forks):
    command = ("eval", str(home / "exported"), *SAMPLING, "--output", str(alone / "results"))
    refused = forks.run(tmp_path, *command)
    assert refused.status == 2 and "has completions of other settings (weights" in refused.err


EXPERIMENT = """# @package _global_
defaults:
  - override /model: init_from
eval:
  sets: [{name: own, path: own.jsonl}]
reward:
  functions: ["my_reward.py:length"]
"""


@pytest.mark.change
def test_an_own_reward_scores_own_prompts_answered_by_a_hugging_face_directory(home, tmp_path, forks):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    (tmp_path / "own.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n')
    (tmp_path / "my_reward.py").write_text(
        "def length(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"
    )
    chosen = ("experiment=mine", "--config-dir", "conf", "generation.max_new_tokens=4")
    run = forks.run(tmp_path, "eval", str(home / "exported"), *chosen, "--output", "results")
    assert run.status == 0, run.err
    lines = [json.loads(line) for line in (tmp_path / "results" / "own.jsonl").read_text().splitlines()]
    scored = [line for line in lines if "reward" in line]
    assert len(scored) == 2 and all(line["reward"] == len(line["text"]) > 0 for line in scored)
    shown = forks.run(
        tmp_path,
        "generate",
        f"init_from={home}/exported",
        *chosen,
        "--prompts",
        "own.jsonl",
        "--output",
        "x.jsonl",
        "--print-config",
    )
    assert shown.status == 0 and "num_layers: 1\n" in shown.out, shown.err

"""Training functions called from Python: twice in a process, on two ranks, with functions of a notebook's cell."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rl_megatron.config.metrics import is_cost
from tests.docs.inputs import hugging_face_model

CELL = """
import rl_megatron

def length(completion_ids, **_):
    return -float(len(completion_ids))

def run(name, **settings):
    return rl_megatron.grpo(
        "qwen2", "prompts.jsonl", [length, {"name": "exact_match", "weight": 2.0}], output_dir=name,
        algorithm={"prompts_per_step": 2, "samples_per_prompt": 2}, generation={"max_new_tokens": 4},
        train={"steps": 2, "global_batch_size": 4, "micro_batch_tokens": 32}, **settings,
    )
"""


@pytest.fixture
def directory(tmp_path):
    """A directory with a small Qwen2, prompts, and prompts with answers."""
    hugging_face_model(tmp_path / "qwen2")
    records = [{"prompt": f"{n} + {n} = ", "answer": str(2 * n)} for n in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))
    return tmp_path


def untimed(result):
    """The history without the times."""
    return [{key: value for key, value in line.items() if not is_cost(key)} for line in result.history]


def again_and_again(arguments):
    """Run the cell as a notebook does, and train several times in this process."""
    import rl_megatron

    namespace = sys.modules["__main__"].__dict__
    exec(compile(CELL, "<cell>", "exec"), namespace)
    run = namespace["run"]
    first, other = run("one"), run("two", **{"train.seed": 1})
    assert run("one").history == first.history, "the finished run is not repeated"
    with pytest.raises(rl_megatron.ConfigError, match="train.seed: 0 → 1"):
        run("one", **{"train.seed": 1})
    assert untimed(run("one", resume=False, **{"train.seed": 1})) == untimed(other) != untimed(first)
    assert [line["step"] for line in first.history if line["kind"] == "train"] == [1, 2]
    assert all(line["reward_length_score"] >= -4 for line in first.history if line["kind"] == "train")
    assert set(first.metrics) >= {"reward_length_score", "reward_exact_match_score"}
    assert first.checkpoint.is_dir() and first.output_dir.name == "one"
    records = [json.loads(line) for line in Path("prompts.jsonl").read_text().splitlines()]
    with_answers = rl_megatron.sft(
        first.checkpoint, {"path": records, "prompt_template": "{prompt}"}, output_dir="three",
        train={"steps": 1, "global_batch_size": 4, "micro_batch_size": 2},
    )  # fmt: skip
    assert "nll_per_token" in with_answers.metrics
    return 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_trains_again_and_again_with_functions_of_a_cell(directory, forks, ranks):
    for finished in forks.run_ranks(directory, ranks=ranks, program=again_and_again):
        assert finished.status == 0, finished.err
        assert "Warning" not in finished.err and "CPU RNG state" not in finished.err + finished.out, finished.err
    assert (directory / "one.imported" / "checkpoint" / "manifest.json").is_file()


def again_with_another_model(arguments):
    import rl_megatron

    exec(compile(CELL, "<cell>", "exec"), sys.modules["__main__"].__dict__)
    config = json.loads(Path("qwen2/config.json").read_text())
    sys.modules["__main__"].__dict__["run"]("one")
    Path("qwen2/config.json").write_text(json.dumps(config | {"comment": "changed"}))
    with pytest.raises(rl_megatron.ConfigError, match="one.imported/checkpoint was made from other files"):
        sys.modules["__main__"].__dict__["run"]("one")
    return 0


def test_a_model_that_changed_since_its_import_is_refused(directory, forks):
    (finished,) = forks.run_ranks(directory, ranks=1, program=again_with_another_model)
    assert finished.status == 0, finished.err

"""Reward functions in a user's directory: with an own loss and a Parquet file on two ranks, and when they fail."""

import pytest

from tests.end_to_end.launch import TINY, checkpoints, metrics
from tests.end_to_end.test_own_files import LOSS
from tests.unit.data.chat_families import write_tokenizer

REWARDS = """
def contains(completion, answer, level):
    return {"score": float(answer in completion), "level": level}

def in_trls_form(prompts, completions, answer, **columns):
    return [len(set(completion)) / 10 for completion in completions]

def fails(completion, prompt):
    raise ValueError("on purpose")
"""
OWN = tuple(word for word in TINY if not word.startswith("data.")) + (
    "data.path=problems.parquet", "data.prompt_template='{prompt}'",
)  # fmt: skip
TRAIN = (
    "train", *OWN, "algorithm=grpo", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2",
    "train.steps=2", "tokenizer.path=tokenizer",
)  # fmt: skip
FUNCTIONS = (
    "reward.functions=[{path: my_rewards.py, name: contains}, {name: my_rewards.py:in_trls_form, weight: 0.5}, "
    "{name: length_penalty, weight: 0.1, kwargs: {max_tokens: 4}}]"
)


@pytest.fixture
def mine(tmp_path, forks):
    """A directory with a reward file, a loss file, a Parquet file and a tokenizer."""
    pandas = pytest.importorskip("pandas")
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "loss.py").write_text(LOSS)
    problems = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "level": n % 3} for n in range(60)]
    pandas.DataFrame(problems).to_parquet(tmp_path / "problems.parquet")
    made = forks.run(
        tmp_path, "train", *TINY, "algorithm=pretrain", "data=arithmetic", "train.steps=1", "output_dir=before"
    )
    assert made.status == 0, made
    (tmp_path / "tokenizer").symlink_to(tmp_path / "before" / "tokenizer")
    return tmp_path


def test_own_rewards_loss_and_data_train_on_two_ranks(mine, forks):
    done = forks.run_ranks(mine, *TRAIN, FUNCTIONS, "loss.name=loss.py:half", ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    lines = metrics(mine / "out")
    names = {
        "reward_contains_score",
        "reward_contains_level",
        "reward_in_trls_form_score",
        "reward_length_penalty_score",
    }
    assert all(names <= line.keys() for line in lines)
    for line in lines:
        parts = line["reward_contains_score"], line["reward_in_trls_form_score"], line["reward_length_penalty_score"]
        assert line["reward"] == pytest.approx(parts[0] + 0.5 * parts[1] + 0.1 * parts[2], abs=1e-5)
    assert checkpoints(mine / "out", "grpo") == ["step-000002"]

    failed = forks.run_ranks(
        mine, *TRAIN, "reward.functions=[{path: my_rewards.py, name: fails}]", "output_dir=failed", ranks=2
    )
    assert [rank.status for rank in failed] == [1, 1], failed
    (line,) = [line for line in failed[0].err.splitlines() if line.startswith("error: ")]
    for words in ("the reward function 'fails' raised ValueError: on purpose", "my_rewards.py:9", "prompt '", "=zero"):
        assert words in line, line
    counted = forks.run(
        mine, *TRAIN, "reward.functions=[{path: my_rewards.py, name: fails}]", "reward.on_error=zero", "output_dir=zero"
    )
    assert counted.status == 0, counted
    assert all(line["reward_fails_errors"] == 8 for line in metrics(mine / "zero") if line["kind"] == "train")


def test_a_parquet_file_for_verl_with_messages_trains_as_it_is(tmp_path, forks):
    pandas = pytest.importorskip("pandas")
    write_tokenizer("qwen3", tmp_path / "tokenizer")
    (tmp_path / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert data_source == 'sums' and int(ground_truth) == 2 * extra_info['index']\n"
        "    return {'score': len(set(solution_str)) / 10, 'index': extra_info['index']}\n"
    )
    problems = [
        {
            "data_source": "sums", "ability": "math", "extra_info": {"index": n},
            "prompt": [{"role": "user", "content": f"{n} + {n}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * n)},
        }
        for n in range(60)
    ]  # fmt: skip
    pandas.DataFrame(problems).to_parquet(tmp_path / "problems.parquet")
    plain = [word for word in TRAIN if not word.startswith("data.prompt_template")]
    arguments = (*plain, "model.max_sequence_length=96", "reward.functions=[{path: score.py, name: compute_score}]")
    done = forks.run_ranks(tmp_path, *arguments, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    lines = [line for line in metrics(tmp_path / "out") if line["kind"] == "train"]
    assert all(line["reward"] == pytest.approx(line["reward_compute_score_score"], abs=1e-5) for line in lines)
    shown = forks.run(tmp_path, "show-batch", *arguments[1:])
    assert "«<|im_start|>»user" in shown.out and "+" in shown.out and "problems.parquet:" in shown.out, shown

"""A loss, a task and an advantage estimator in a user's files train by import strings, without a plugin module."""

import shutil

import pytest
import yaml

from tests.end_to_end.launch import TINY, checkpoints, metrics

LOSS = """
from rl_megatron import masked_mean

def half(data, global_valid_seqs, global_valid_toks, next_token_logprobs):
    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    terms = data["advantages"][:, 1:] * next_token_logprobs
    loss = -0.5 * masked_mean(terms, mask, global_normalization_factor=global_valid_toks)
    return loss, {"loss": loss.detach()}

def without_logprobs(data, logits): ...
"""
TASK = """
class Reverse:
    def __init__(self, letters=3):
        self.letters = letters

    def train_problems(self):
        return [(f"{number:0{self.letters}d}>", "1") for number in range(10, 100)]

    def heldout_problems(self):
        return [(f"{number:0{self.letters}d}>", "1") for number in range(10)]

    def reward(self, problem, completion):
        return float(len(completion)) / 10
"""
ADVANTAGE = "def constant(inputs):\n    return inputs.rewards * 0 + 3.0\n"
TRAIN = (
    "train", *TINY, "algorithm=grpo", "data=arithmetic", "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=2", "train.steps=2",
    "loss.name=loss.py:half", "data.task.name=task.py:Reverse", "data.task.letters=2", "train.save_every=1",
    "algorithm.advantage_estimator=advantage.py:constant",
)  # fmt: skip


@pytest.fixture
def mine(tmp_path):
    """A directory with the three files."""
    for name, text in {"loss": LOSS, "task": TASK, "advantage": ADVANTAGE}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_own_files_train_on_two_ranks_and_resume_from_another_directory(mine, forks):
    done = forks.run_ranks(mine, *TRAIN, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    out, elsewhere = mine / "out", mine / "elsewhere"
    before = metrics(out)
    steps = [line for line in before if line["kind"] == "train"]
    assert [line["step"] for line in steps] == [1, 2] and all(line["loss"] > 1 for line in steps)
    saved = yaml.safe_load((out / "config.yaml").read_text())["stages"]["grpo"]
    assert saved["loss"] == {"name": f"{mine / 'loss.py'}:half"}, "the keys of the default loss were kept"
    assert saved["data"]["task"] == {"name": f"{mine / 'task.py'}:Reverse", "letters": 2}

    shutil.rmtree(out / "checkpoints" / "grpo" / "step-000002")
    elsewhere.mkdir()
    absolute = [word.replace("name=", f"name={mine}/").replace("estimator=", f"estimator={mine}/") for word in TRAIN]
    again = forks.run(elsewhere, *absolute, f"output_dir={out}")
    assert again.status == 0, again
    assert checkpoints(out, "grpo") == ["step-000001", "step-000002"]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("loss.name=loss.py:without_logprobs", "has no parameter next_token_logprobs"),
        ("loss.scale=2", "loss.scale has no effect: loss.name="),
        ("data.task.leters=2", "did you mean 'letters'?"),
    ],
)
def test_what_does_not_suit_is_refused_before_the_first_step(mine, forks, override, words):
    refused = forks.run(mine, *TRAIN, override)
    assert refused.status == 2
    assert words in refused.err and refused.err.count("\n") == 1, refused.err
    assert not (mine / "out").exists()

"""Online DPO from the policy's own completions: it learns a reward, in any layout the same."""

import pytest

from tests.end_to_end.launch import TINY, metrics

ONLINE = (
    "train", *TINY, "algorithm=online_dpo", "loss=dpo", "algorithm.prompts_per_step=16",
    "algorithm.samples_per_prompt=4", "train.global_batch_size=32", "train.steps=40",
    "train.eval_every=0", "optimizer.lr=0.03", "optimizer.decay_steps=40",
    "reward.functions=[{path: own.py, name: ascii}]", "reward.num_workers=1",
)  # fmt: skip
OWN = """
def ascii(prompt, completion, **fields):
    return sum(letter.isascii() for letter in completion) / 4
"""


def steps(directory):
    return [line for line in metrics(directory) if line["kind"] == "train"]


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def test_it_learns_a_reward_and_two_layouts_give_the_same(directory, forks):
    done = forks.run(directory, *ONLINE)
    assert done.status == 0, done.err
    whole = steps(directory / "out")
    assert whole[0]["loss"] == pytest.approx(0.6931, rel=1e-3) and whole[0]["accuracy"] == 0, "reference ≠ policy"
    first, last = (sum(line["reward"] for line in lines) / 5 for lines in (whole[:5], whole[-5:]))
    assert last > first + 0.2
    short = (*ONLINE, "train.steps=3")  # how many prompts are drawn decides which
    done = forks.run(directory, *short, "output_dir=short")
    assert done.status == 0, done.err
    for name, layout in (("data", ()), ("tensor", ("parallel.tensor=2",))):
        done = forks.run_ranks(directory, *short, f"output_dir={name}", *layout, ranks=2)
        assert [rank.status for rank in done] == [0, 0], done
        for found, wanted in zip(steps(directory / name), steps(directory / "short"), strict=True):
            for key in ("loss", "accuracy", "reward", "rewards_chosen_mean", "rewards_rejected_mean", "grad_norm"):
                assert found[key] == pytest.approx(wanted[key], rel=1e-3, abs=1e-5), (name, found["step"], key)


def test_a_loss_that_does_not_compare_pairs_is_refused(directory, forks):
    refused = forks.run(directory, *ONLINE, "loss=clipped_pg")
    assert refused.status == 2 and "loss.name=clipped_pg does not use logprobs of pairs" in refused.err
    assert not (directory / "out").exists()

"""Reward models as reward functions: the whole path of the example as one run, and what is refused before a step."""

import runpy
from pathlib import Path

import pytest

from tests.end_to_end.launch import TINY, metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "reward_model_ppo"
STAGES = ("pretrain", "sft", "reward_model", "heldout_reward_model", "ppo")
SHORT = (
    "train", "--config-dir", str(EXAMPLE), "experiment=reward_model_ppo", "model.num_layers=1", "model.hidden_size=32",
    "model.ffn_hidden_size=64", "model.num_attention_heads=2", "model.num_query_groups=2", "data.num_documents=400",
    "data.num_eval_examples=8", *(f"stages.{name}.train.steps=2" for name in STAGES),
    "stages.reward_model.train.eval_every=0", "stages.heldout_reward_model.train.eval_every=0",
    "stages.ppo.algorithm.prompts_per_step=8", "stages.ppo.algorithm.critic_warmup_steps=0",
    "stages.ppo.train.global_batch_size=16", "stages.ppo.train.eval_every=0", "stages.ppo.train.save_every=1",
    "output_dir=out",
)  # fmt: skip


@pytest.fixture
def pairs(tmp_path):
    runpy.run_path(str(EXAMPLE / "make_pairs.py"))["main"](tmp_path)
    return tmp_path


def test_five_stages_hand_their_weights_on_by_name_and_ppo_learns_from_the_reward_model(pairs, forks):
    done = forks.run_ranks(pairs, *SHORT, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    lines = [line for line in metrics(pairs / "out") if line["kind"] == "train"]
    assert [line["stage"] for line in lines if line["step"] == 2] == list(STAGES)
    of_ppo = [line for line in lines if line["stage"] == "ppo"]
    for line in of_ppo:
        assert abs(line["reward"] - line["reward_reward_model_score"]) < 1e-5  # the others have a weight of 0
        assert line["reward_heldout_score"] == line["reward_heldout_raw"]
        assert line["reward_reward_model_raw"] != line["reward_heldout_raw"] and "reward_exact_match_score" in line


def test_a_model_that_cannot_score_is_refused_before_the_first_step(pairs, forks):
    trained = forks.run(pairs, "train", *TINY, "algorithm=pretrain", "train.steps=1", "output_dir=lm")
    assert trained.status == 0, trained
    checkpoint = "lm/checkpoints/pretrain/step-000001"
    for kwargs, words in (
        (f"{{init_from: {checkpoint}}}", "holds a language model, but a reward model or critic"),
        ("{init_from: absent}", "checkpoint absent does not exist"),
        ("{hf: lm}", "config.json is missing"),
    ):
        function = f"reward.functions=[{{name: reward_model, kwargs: {kwargs}}}]"
        refused = forks.run(pairs, "train", *TINY, "algorithm=grpo", function, "output_dir=out")
        assert refused.status == 2 and words in refused.err, refused
        assert f"reward.functions[0].kwargs.{kwargs[1:].partition(':')[0]}" in refused.err

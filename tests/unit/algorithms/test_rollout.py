"""From prompts to scored rollouts, with an engine that gives scripted answers."""

from dataclasses import replace

import pytest
import torch

from rl_megatron.algorithms.advantage_estimators import estimate_advantages
from rl_megatron.algorithms.advantages import group_relative
from rl_megatron.algorithms.ppo import add_advantages
from rl_megatron.algorithms.rollout import (
    add_logprobs,
    needs_reference,
    recomputes_logprobs,
    reward_kl,
    rewards_per_token,
)
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.config.algorithms import GRPOConfig, PPOConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.data import training_data
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.order import ShuffledEpochs
from rl_megatron.losses import build_loss
from rl_megatron.rollouts.sampler import join, keep_informative
from rl_megatron.rollouts.statistics import learned_statistics, logprob_mismatch, statistics
from tests.unit.algorithms.fakes import (
    Characters,
    Echo,
    Problems,
    ScoredHere,
    Scripted,
    decoded,
    sampling,
    whole,
)


@pytest.fixture
def rollouts_of(monkeypatch):
    """`rollouts_of(answers)`: one group per entry of {prompt: its completions}, in this order; and the engine."""

    def make(answers, size=2):
        config = load_config(
            ["algorithm=grpo", f"algorithm.prompts_per_step={len(answers)}", f"algorithm.samples_per_prompt={size}"]
        ).first
        monkeypatch.setattr(training_data, "build_source", lambda stage: Problems(Echo(tuple(answers))))
        monkeypatch.setattr(ShuffledEpochs, "items", lambda self, start, count: list(range(count)))
        engine = Scripted({prompt: list(texts) for prompt, texts in answers.items()})
        _, _, sampler = sampling(config, engine, ScoredHere(Echo()))
        return sampler.draw(1), engine

    return make


def algorithm(**settings):
    return GRPOConfig(samples_per_prompt=2, **settings)


def test_groups_are_contiguous_and_scored(rollouts_of):
    rollouts, engine = rollouts_of({"a": ["1", "0.5"], "bcd": ["22", "22"]})
    assert [words for words, _ in engine.calls] == [["a", "a", "bcd", "bcd"]]
    assert rollouts["rewards"].tolist() == [1.0, 0.5, 22.0, 22.0]


def test_advantages_weigh_the_completion_and_not_the_prompt(rollouts_of):
    rollouts, _ = rollouts_of({"a": ["1", "0.5"], "bcd": ["22", "22"]})
    found = estimate_advantages(whole(rollouts), algorithm(), None)
    of_rows = group_relative(rollouts["rewards"], 2)
    assert of_rows[0] > 0 and of_rows[2] == 0
    assert torch.equal(found, of_rows[:, None] * rollouts["token_mask"])
    assert found[0].count_nonzero() == 2, "the completion's character and its end"


def test_the_algorithm_chooses_the_advantages(rollouts_of):
    rollouts, _ = rollouts_of({"a": ["3", "1"]})
    found = estimate_advantages(whole(rollouts), algorithm(leave_one_out=True, normalize_std=False), None)
    assert found.amax(1).tolist() == [2.0, 0.0] and found.amin(1).tolist() == [0.0, -2.0]


KL_IN_REWARD = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"}


def with_policies(rollouts):
    """Every sampled token a quarter of a nat likelier than under the reference."""
    rollouts["prev_logprobs"] = -1.0 * rollouts["token_mask"]
    rollouts["reference_policy_logprobs"] = -1.25 * rollouts["token_mask"]
    return rollouts


def test_reinforce_plus_plus_weighs_tokens_against_the_whole_batch(rollouts_of):
    rollouts = with_policies(rollouts_of({"a": ["1", "5"], "b": ["2", "22"]})[0])
    loss_fn = build_loss("clipped_pg", KL_IN_REWARD)
    found = estimate_advantages(whole(rollouts), algorithm(advantage_estimator="reinforce_plus_plus"), loss_fn)
    penalty = 0.5 * 0.25
    to_go = torch.tensor([[1 - 2 * penalty, 1 - penalty], [5 - 2 * penalty, 5 - penalty]])
    sampled = rollouts["token_mask"].bool()
    returns = torch.cat([to_go.flatten(), torch.tensor([2 - 2 * penalty, 2 - penalty])])
    returns = torch.cat([returns, torch.tensor([22 - 3 * penalty, 22 - 2 * penalty, 22 - penalty])])
    torch.testing.assert_close(found[sampled], (returns - returns.mean()) / returns.std(), rtol=1e-5, atol=1e-6)
    assert (found[~sampled] == 0).all()


def test_ppo_rewards_include_the_kl_if_the_loss_does_not(rollouts_of):
    rollouts = with_policies(rollouts_of({"a": ["1", "5"]})[0])
    rollouts["values"] = 0.5 * rollouts["token_mask"]
    config = PPOConfig(gae_lambda=1.0, whiten_advantages=False)
    for cfg, penalty in [(KL_IN_REWARD, 0.125), (KL_IN_REWARD | {"use_kl_in_reward": False}, 0.0)]:
        found = add_advantages(whole(rollouts), config, build_loss("clipped_pg", cfg))
        assert found["returns"][0].tolist() == [0.0, 1 - 2 * penalty, 1 - penalty]
        assert found["advantages"][1].tolist() == [0.0, 4.5 - 2 * penalty, 4.5 - penalty]


def test_the_clamps_of_the_kl_apply_in_the_reward_too(rollouts_of):
    rollouts = with_policies(rollouts_of({"a": ["1", "5"]})[0])
    clamped = build_loss("clipped_pg", KL_IN_REWARD | {"kl_output_clamp_value": 0.125})
    found = rewards_per_token(rollouts, TrajectoryIndex(rollouts), clamped)
    assert found[0].tolist() == [
        0.0,
        -0.5 * 0.125,
        1 - 0.5 * 0.125,
    ]


def test_the_kl_in_the_reward_is_reported_over_sampled_tokens(rollouts_of):
    rollouts = with_policies(rollouts_of({"a": ["1", "5"], "b": ["2", "22"]})[0])
    rollouts["prev_logprobs"][0, 1] = -1.0 + 0.9  # of nine sampled tokens
    rollouts["reference_policy_logprobs"][:, 0] = torch.nan  # the prompt
    loss_fn = build_loss("clipped_pg", KL_IN_REWARD)
    assert reward_kl(whole(rollouts), loss_fn) == {"reward_kl": pytest.approx(0.25 + 0.9 / 9)}
    assert reward_kl(whole(rollouts), build_loss("clipped_pg", KL_IN_REWARD | {"use_kl_in_reward": False})) == {}


def test_the_reference_is_used_if_the_loss_or_the_reward_needs_it():
    assert needs_reference(build_loss("clipped_pg", KL_IN_REWARD))
    assert needs_reference(build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.1}))
    assert not needs_reference(build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.0}))
    assert not needs_reference(build_loss("clipped_pg", {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.0}))


def test_completions_are_only_the_sampled_text(rollouts_of):
    rollouts, _ = rollouts_of({"a": ["1", "234"], "bcd": ["5", "6"]})
    assert decoded(rollouts, Characters()) == ["1", "234", "5", "6"]


def test_only_informative_groups_are_kept(rollouts_of):
    rollouts, _ = rollouts_of({"a": ["1", "1"], "b": ["1", "2"], "c": ["0", "0"], "d": ["5", "4"]})
    kept = keep_informative(Batch.from_whole(rollouts), 2)
    assert kept.size == 4
    assert kept["rewards"].tolist() == [1.0, 2.0, 5.0, 4.0]
    assert decoded(kept, Characters()) == ["1", "2", "5", "4"]
    assert kept["prompt_lengths"].tolist() == [1] * 4
    none, _ = rollouts_of({"a": ["1", "1"]})
    assert keep_informative(Batch.from_whole(none), 2).size == 0


def test_rounds_are_joined_in_order_up_to_the_limit(rollouts_of):
    narrow, _ = rollouts_of({"a": ["1", "2"]})
    wide, _ = rollouts_of({"bcdefg": ["3", "44"], "h": ["5", "6"]})
    joined = join([Batch.from_whole(narrow), Batch.from_whole(wide)], 4)
    assert joined["rewards"].tolist() == [1.0, 2.0, 3.0, 44.0]
    assert decoded(joined, Characters()) == ["1", "2", "3", "44"]
    assert joined["token_mask"].sum(1).tolist() == [2.0, 2.0, 2.0, 3.0]
    assert join([Batch.from_whole(narrow), Batch.from_whole(wide)], 100).size == 6
    assert torch.equal(join([Batch.from_whole(narrow)], 2)["input_ids"], narrow["input_ids"])


def test_statistics_of_rollouts(rollouts_of):
    rollouts, _ = rollouts_of({"a": ["1", "1"], "b": ["10", "20"], "c": ["0", "0"], "d": ["100", "4"]})
    rollouts["stopped"][:2] = False
    assert statistics([whole(rollouts)], 2) == pytest.approx(
        {
            "reward": (1 + 1 + 10 + 20 + 0 + 0 + 100 + 4) / 8,
            "reward_std": rollouts["rewards"].std(correction=0).item(),
            "reward_min": 0.0, "reward_p10": 0.0, "reward_p50": 4.0, "reward_p90": 20.0, "reward_max": 100.0,
            "completion_tokens": (2 + 2 + 3 + 3 + 2 + 2 + 4 + 2) / 8, "completion_tokens_std": 0.5**0.5,
            "completion_tokens_min": 2.0, "completion_tokens_p10": 2.0, "completion_tokens_p50": 2.0,
            "completion_tokens_p90": 3.0, "completion_tokens_max": 4.0, "stopped": 6 / 8, "informative_groups": 2 / 4,
        }
    )  # fmt: skip


def test_advantages_count_at_sampled_tokens_and_weights_have_an_age():
    rollouts = BatchedDataDict(
        advantages=torch.tensor([[9.0, 1.0, 1.0], [9.0, -3.0, 9.0]]), weight_version=torch.tensor([5, 7]),
        token_mask=torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]),
    )  # fmt: skip
    found = learned_statistics(whole(rollouts), 7)
    assert (found["weight_age_mean"], found["weight_age_max"]) == (1.0, 2.0)
    assert (found["advantage_min"], found["advantage_p50"], found["advantage_max"]) == (-3.0, 1.0, 1.0)
    assert found["advantage_mean"] == pytest.approx(-1 / 3)
    of_sequences = BatchedDataDict(rollouts, advantages=torch.tensor([2.0, 4.0]))
    assert learned_statistics(whole(of_sequences), 7)["advantage_mean"] == 3.0


def test_mismatch_counts_sampled_tokens_only():
    rollouts = BatchedDataDict(
        token_mask=torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 0.0]]),
        generation_logprobs=torch.tensor([[9.0, -1.0, -2.0], [9.0, -3.0, 9.0]]),
        prev_logprobs=torch.tensor([[0.0, -1.5, -1.0], [0.0, -3.0, 0.0]]),
    )
    assert logprob_mismatch(whole(rollouts)) == pytest.approx(
        {"mismatch_mean": 0.5, "mismatch_p99": 1.0, "mismatch_max": 1.0}
    )
    rollouts["token_mask"] = torch.zeros(2, 3)
    assert logprob_mismatch(whole(rollouts)) == {"mismatch_mean": 0.0, "mismatch_p99": 0.0, "mismatch_max": 0.0}


def test_mismatch_is_not_hidden_by_a_masked_nan():
    rollouts = BatchedDataDict(
        token_mask=torch.tensor([[0.0, 1.0]]),
        generation_logprobs=torch.tensor([[torch.nan, -1.0]]),
        prev_logprobs=torch.tensor([[0.0, -1.25]]),
    )
    assert logprob_mismatch(whole(rollouts)) == {"mismatch_mean": 0.25, "mismatch_p99": 0.25, "mismatch_max": 0.25}


def test_nothing_is_compared_here_if_the_logprobs_were_not_recomputed(rollouts_of):
    assert logprob_mismatch(whole(rollouts_of({"a": ["1", "2"]})[0])) == {}


def test_logprobs_of_the_engine_are_taken_only_if_they_are_asked_for(rollouts_of):
    rollouts = rollouts_of({"a": ["1", "2"]})[0]
    assert "prev_logprobs" not in add_logprobs(rollouts, None, recompute=False, reference=False)
    found = add_logprobs(rollouts, None, recompute=False, reference=False, from_engine=True)
    assert torch.equal(found["prev_logprobs"], rollouts["generation_logprobs"])


def may_read_the_batch(inputs):
    return inputs.rewards


def test_logprobs_are_recomputed_if_the_loss_or_the_advantages_may_read_them():
    class Needy:
        required_keys = ("advantages", "prev_logprobs")

    def recomputed(loss_fn, **settings):
        stage = load_config(["algorithm=grpo", "train.global_batch_size=256"]).first
        settings = GRPOConfig(**settings)
        return recomputes_logprobs(replace(stage, algorithm=settings), settings, loss_fn)

    own = build_loss("clipped_pg", {})
    assert not recomputed(own)
    assert recomputed(own, recompute_logprobs="always")
    assert recomputed(own, updates_per_rollout=2)
    assert recomputed(own, advantage_estimator=f"{__name__}:may_read_the_batch")
    assert recomputed(Needy()) and recomputed(lambda **_: None)
    assert not recomputed(lambda **_: None, recompute_logprobs="never")
    with pytest.raises(ConfigError, match=r"recompute_logprobs=never: loss.name=clipped_pg needs 'prev_logprobs'"):
        recomputed(Needy(), recompute_logprobs="never")

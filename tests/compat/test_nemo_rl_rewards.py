"""NeMo RL's advantage estimators and the functions that change rewards, under its import paths."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.algorithms.advantages import generalized_advantages, group_decoupled, group_relative, whiten
from rl_megatron.compat.nemo_rl import MODULES
from rl_megatron.compat.nemo_rl.batched_data_dict import BatchedDataDict
from rl_megatron.compat.nemo_rl.errors import RuleError

ESTIMATORS = MODULES["nemo_rl.algorithms.advantage_estimator"]
GRPO = MODULES["nemo_rl.algorithms.grpo"]
SHAPING = MODULES["nemo_rl.algorithms.reward_functions"]
UTILS = MODULES["nemo_rl.algorithms.utils"]
calculate_baseline_and_std = UTILS["calculate_baseline_and_std_per_prompt"]

PROMPTS = torch.tensor([[5, 1], [7, 1], [5, 1], [7, 1], [5, 1]])  # the samples of the two prompts alternate
REWARDS = torch.tensor([1.0, 4.0, 2.0, 8.0, 6.0])
ALL = torch.ones(5)
PAIRS = torch.arange(3).repeat_interleave(2)[:, None]
TOKENS = torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]])


def close(found, want):
    torch.testing.assert_close(found, torch.as_tensor(want, dtype=found.dtype), rtol=1e-5, atol=1e-5)


# ---- baselines


def test_a_baseline_is_the_mean_of_the_prompts_samples():
    baseline, deviation = calculate_baseline_and_std(PROMPTS, REWARDS, ALL, leave_one_out_baseline=False)
    close(baseline, [3, 6, 3, 6, 3])
    first, second = 7**0.5, 8**0.5  # squares around 3: 4 + 1 + 9, and around 6: 4 + 4
    close(deviation, [first, second, first, second, first])


def test_leave_one_out_takes_the_baseline_and_the_deviation_of_the_others():
    baseline, deviation = calculate_baseline_and_std(PROMPTS, REWARDS, ALL)
    close(baseline, [4, 8, 3.5, 4, 1.5])
    close(deviation, [8**0.5, 0, 12.5**0.5, 0, 0.5**0.5])


def test_a_sample_that_is_not_valid_is_in_no_baseline_and_a_prompt_with_one_valid_sample_has_its_own_reward():
    valid = torch.tensor([1, 0, 1, 1, 0])
    baseline, deviation = calculate_baseline_and_std(PROMPTS, REWARDS, valid, leave_one_out_baseline=False)
    close(baseline, [1.5, 4, 1.5, 8, 1.5])
    close(deviation, [0.5**0.5, 0, 0.5**0.5, 0, 0.5**0.5])
    close(calculate_baseline_and_std(PROMPTS, REWARDS, valid)[0], [2, 4, 1, 8, 1.5])


def test_the_deviation_of_other_samples_that_are_equal_is_exactly_0():
    deviation = calculate_baseline_and_std(torch.zeros(4, 1), torch.tensor([0.1, 0.7, 0.7, 0.7]), torch.ones(4))[1]
    assert deviation[0] == 0 and (deviation[1:] > 0).all()


def test_the_deviation_may_be_of_other_rewards_than_the_baseline():
    baseline, deviation = calculate_baseline_and_std(PROMPTS, 0 * REWARDS, ALL, False, std_rewards=REWARDS)
    close(baseline, [0, 0, 0, 0, 0])
    close(deviation, calculate_baseline_and_std(PROMPTS, REWARDS, ALL, False)[1])


# ---- estimators


def test_grpo_without_leave_one_out_is_the_cores_estimator_at_every_token():
    rewards = torch.tensor([1.0, 0.0, 3.0, 3.0, 0.5, 2.0])
    for normalize in (True, False):
        settings = {"use_leave_one_out_baseline": False, "normalize_rewards": normalize}
        estimator = ESTIMATORS["GRPOAdvantageEstimator"](settings, {})
        found = estimator.compute_advantage(prompt_ids=PAIRS, rewards=rewards, mask=TOKENS, repeated_batch={})
        close(found, group_relative(rewards, 2, normalize_std=normalize)[:, None].expand(6, 4))


def test_grpo_divides_by_the_deviation_of_the_others_and_by_nothing_if_that_is_0():
    for settings in ({"name": "grpo"}, ESTIMATORS["AdvEstimatorConfig"](name="grpo")):
        found = ESTIMATORS["GRPOAdvantageEstimator"](settings, {}).compute_advantage(PROMPTS, REWARDS, torch.ones(5, 2))
        close(found[:, 0], [-3 / 8**0.5, -4, -1.5 / 12.5**0.5, 4, 4.5 / 0.5**0.5])


def test_grpo_leaves_samples_that_are_not_valid_out_of_the_baseline():
    estimator = ESTIMATORS["GRPOAdvantageEstimator"]({"normalize_rewards": False}, {})
    found = estimator.compute_advantage(PROMPTS, REWARDS, torch.ones(5, 2), valid_mask=torch.tensor([1, 0, 1, 1, 0]))
    close(found[:, 1], [-1, 0, 1, 0, 4.5])


@pytest.mark.parametrize("keys", [("reward/a", "reward/b"), ("reward2", "reward10")])
def test_gdpo_normalises_each_component_then_their_weighted_sum(keys):
    scores = torch.tensor([[1.0, 0.0, 3.0, 3.0, 0.5, 2.0], [10.0, 30.0, 20.0, 90.0, 40.0, 10.0]])
    batch = {keys[1]: scores[1], keys[0]: scores[0], "reward": scores[0], "rewards_total": scores[1]}
    assert UTILS["get_gdpo_reward_component_keys"](batch) == list(keys)
    settings = {"use_leave_one_out_baseline": False, "reward_weights": [1.0, 0.25]}
    estimator = ESTIMATORS["GDPOAdvantageEstimator"](settings, {})
    found = estimator.compute_advantage(PAIRS, None, TOKENS, batch)
    close(found, group_decoupled(scores.T, torch.tensor([1.0, 0.25]), 2)[:, None].expand(6, 4))


def test_gdpo_normalises_over_the_samples_that_are_valid():
    estimator, valid = ESTIMATORS["GDPOAdvantageEstimator"]({}, {}), torch.tensor([1, 1, 1, 1, 0])
    found = []
    for of_masked in (0.0, 100.0):
        batch = {"reward/a": torch.tensor([1.0, 0.5, 3.0, 2.0, of_masked]), "reward/b": REWARDS}
        found.append(estimator.compute_advantage(PROMPTS, None, torch.ones(5, 2), batch, valid_mask=valid)[valid != 0])
    close(*found)


def test_gdpo_names_missing_components_and_weights():
    estimator = ESTIMATORS["GDPOAdvantageEstimator"]({"reward_weights": [1.0]}, {})
    batch = {"reward/a": torch.ones(6), "reward/b": torch.ones(6)}
    with pytest.raises(ValueError, match="reward_weights has 1 entries, but the batch has 2 reward components"):
        estimator.compute_advantage(PAIRS, None, TOKENS, batch)
    del batch["reward/a"]
    with pytest.raises(ValueError, match=r"multiple reward components.*'reward/b'.*GRPOAdvantageEstimator"):
        estimator.compute_advantage(PAIRS, None, TOKENS, batch)


def test_reinforce_plus_plus_normalises_rewards_over_tokens_and_takes_the_kl_of_each():
    rewards = torch.tensor([1.0, 0.0, 3.0, 3.0, 0.5, 2.0])
    policy, reference = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    loss_config = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"}
    logprobs = {"logprobs_policy": policy, "logprobs_reference": reference}
    centred = rewards - torch.tensor([0.5, 0.5, 3.0, 3.0, 1.25, 1.25])
    for minus_baseline, scores in ((True, centred), (False, rewards)):
        estimator = ESTIMATORS["ReinforcePlusPlusAdvantageEstimator"]({"minus_baseline": minus_baseline}, loss_config)
        found = estimator.compute_advantage(PAIRS, rewards, TOKENS, **logprobs)
        close(found, whiten(scores[:, None] - 0.5 * (policy - reference), TOKENS))
    with pytest.raises(RuleError, match="needs logprobs_policy and logprobs_reference"):
        estimator.compute_advantage(PAIRS, rewards, TOKENS)
    estimator = ESTIMATORS["ReinforcePlusPlusAdvantageEstimator"]({}, {})
    close(estimator.compute_advantage(PAIRS, rewards, TOKENS), whiten(centred[:, None].expand(6, 4), TOKENS))


def test_raw_rewards_are_normalised_over_tokens_or_not_at_all():
    rewards = torch.arange(6.0)
    for normalize, want in (
        (True, whiten(rewards[:, None].expand(6, 4), TOKENS)),
        (False, rewards[:, None].expand(6, 4)),
    ):
        estimator = ESTIMATORS["RawRewardAdvantageEstimator"]({"normalize_advantages": normalize}, {})
        advantages, returns = estimator.compute_advantage(PAIRS, rewards, TOKENS)
        close(advantages, want)
        assert returns is None


def test_gae_has_the_reward_at_the_last_token_and_separate_lambdas_of_returns_and_advantages():
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    scored = torch.zeros(6, 4)
    scored[range(6), [2, 3, 2, 3, 3, 3]] = torch.arange(1.0, 7.0)
    settings = {"gae_lambda": 0.9, "gae_gamma": 0.8, "normalize_advantages": False}
    for own, of_advantages, of_returns in (
        ({}, 0.9, 0.9),
        ({"gae_lambda_policy": 0.5}, 0.5, 0.9),
        ({"gae_lambda_value": 1.0}, 0.9, 1.0),
    ):
        estimator = ESTIMATORS["GeneralizedAdvantageEstimator"](ESTIMATORS["GAEConfig"](**settings, **own), {})
        advantages, returns = estimator.compute_advantage(PAIRS, torch.arange(1.0, 7.0), TOKENS, values, lengths=None)
        close(advantages, generalized_advantages(scored, values, TOKENS, discount=0.8, gae_lambda=of_advantages)[0])
        close(returns, generalized_advantages(scored, values, TOKENS, discount=0.8, gae_lambda=of_returns)[1])


def test_gae_penalises_the_kl_and_normalises_the_advantages_of_tokens():
    values, policy, reference = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    loss_config = {"use_kl_in_reward": True, "reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"}
    estimator = ESTIMATORS["GeneralizedAdvantageEstimator"]({"gae_lambda": 0.0, "gae_gamma": 0.0}, loss_config)
    advantages, _ = estimator.compute_advantage(
        PAIRS, torch.zeros(6), TOKENS, values, logprobs_policy=policy, logprobs_reference=reference
    )
    close(advantages, whiten(-0.5 * (policy - reference) - values, TOKENS))


def test_settings_of_estimators_are_strict():
    with pytest.raises(KeyError, match="did you mean 'normalize_rewards'"):
        ESTIMATORS["GRPOAdvantageEstimator"]({"normalise_rewards": True}, {})
    with pytest.raises(RuleError, match="length_adaptive_alpha=0.1 is not provided.*gae_lambda_policy"):
        ESTIMATORS["GeneralizedAdvantageEstimator"]({"length_adaptive_alpha": 0.1}, {})


# ---- rewards


def responses(lengths, rewards):
    logs = [
        [{"role": "user", "token_ids": torch.arange(9)}, {"role": "assistant", "token_ids": torch.arange(length)}]
        for length in lengths
    ]
    return BatchedDataDict(message_log=logs, total_reward=torch.tensor(rewards))


def test_rewards_are_clamped_and_scaled_in_place_with_their_components():
    scale_rewards, config = GRPO["scale_rewards"], GRPO["RewardScalingConfig"]
    batch = BatchedDataDict(total_reward=torch.tensor([-3.0, 0.0, 9.0]))
    batch["reward/a"] = torch.tensor([2.0, 1.0, -2.0])
    settings = {"enabled": True, "source_min": -2.0, "source_max": 2.0, "target_min": -5.0, "target_max": 5.0}
    for disabled in (config(), {"enabled": False}):
        assert scale_rewards(batch, disabled)["total_reward"].tolist() == [-3.0, 0.0, 9.0]
    assert scale_rewards(batch, config(**settings)) is batch
    assert batch["total_reward"].tolist() == [-5.0, 0.0, 5.0] and batch["reward/a"].tolist() == [5.0, 2.5, -5.0]
    assert scale_rewards(batch, settings | {"source_min": 0.0})["total_reward"].tolist() == [-5.0, -5.0, 5.0]
    with pytest.raises(RuleError, match="source_min=2.0 must be less than source_max=2.0"):
        scale_rewards(batch, settings | {"source_min": 2.0})


DAPO = {"enabled": True, "overlong_buffer_length": 5, "overlong_buffer_penalty": 0.5, "max_response_length": 25}


def test_long_responses_lose_reward_past_the_longest_too():
    shape, config = SHAPING["apply_reward_shaping"], SHAPING["RewardShapingConfig"]
    batch = responses([20, 22, 25, 30], [1.0, 0.8, 0.6, 0.4])
    assert shape(batch, config()) is batch and "unshaped_total_reward" not in batch
    assert shape(batch, config(**DAPO)) is batch
    close(batch["total_reward"], [1.0, 0.6, 0.1, -0.6])
    close(batch["unshaped_total_reward"], [1.0, 0.8, 0.6, 0.4])
    short = BatchedDataDict(total_reward=torch.zeros(2), response_token_lengths=torch.tensor([25, 3]))
    close(shape(short, DAPO)["total_reward"], [-0.5, 0.0])


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_truncated_responses_keep_a_share_of_their_reward(kind):
    batch = responses([5, 5], [1.0, 0.8])
    batch["truncated"] = kind([False, True])
    close(
        SHAPING["apply_reward_shaping"](batch, DAPO | {"stop_properly_penalty_coef": 0.5})["total_reward"], [1.0, 0.4]
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_response_length": None}, "DAPO reward shaping is currently supported.*max_response_length=None"),
        ({"overlong_buffer_penalty": -1.0}, "overlong_buffer_penalty=-1.0 must be >=0"),
        ({"overlong_buffer_length": 26}, "overlong_buffer_length=26 must be from 1 to max_response_length=25"),
        ({"stop_properly_penalty_coef": 1.5}, r"stop_properly_penalty_coef must be in \[0, 1\], got 1.5"),
        ({"stop_properly_penalty_coef": 0.5}, "truncated field not found in batch"),
    ],
)
def test_reward_shaping_names_what_is_missing(changes, words):
    with pytest.raises(RuleError, match=words):
        SHAPING["apply_reward_shaping"](responses([5], [1.0]), DAPO | changes)


def test_reward_shaping_needs_one_response_for_each_reward():
    batch = responses([5], [1.0, 2.0])
    with pytest.raises(AssertionError, match="The number of messages in the batch must match the number of rewards"):
        SHAPING["apply_reward_shaping"](batch, DAPO)
    batch["message_log"] = [[{"role": "user", "token_ids": torch.arange(2)}]] * 2
    with pytest.raises(AssertionError, match="Assistant response not found during reward shaping"):
        SHAPING["apply_reward_shaping"](batch, DAPO)

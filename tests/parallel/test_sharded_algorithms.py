"""Steps of GRPO and PPO on rollouts whose sequences have owners equal those of one process that has all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl_megatron.algorithms.advantage_estimators import estimate_advantages, group_for_owners
from rl_megatron.algorithms.covariances import add_covariance_mask
from rl_megatron.algorithms.ppo import add_advantages
from rl_megatron.algorithms.rollout import add_logprobs, reward_kl, whole_trajectories
from rl_megatron.batching.config import Batching
from rl_megatron.config.algorithms import GRPOConfig, PPOConfig
from rl_megatron.losses import build_loss
from rl_megatron.rollouts.sampler import join, keep_informative
from rl_megatron.rollouts.statistics import learned_statistics, logprob_mismatch, statistics
from tests.parallel.layouts import build_policy, gradients, weights, worst_relative_error
from tests.parallel.test_sharded_batches import PACKED, as_produced, gathered, whole_batch

ADVANTAGE_TOLERANCE, GRADIENT_TOLERANCE = 2e-5, 1e-4
LAYOUTS = {
    "data 2": (2, {}),
    "data 3": (3, {}),
    "data 2 tensor 2": (4, {"tensor": 2, "sequence": True}),
    "data 2 context 2": (4, {"context": 2}),
}
OWN = f"{Path(__file__).with_name('own_estimator.py')}:over_the_batch"
ESTIMATORS = [
    "group_relative",
    "group_relative_turns",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "group_decoupled",
    OWN,
]


def rollouts(policy, everywhere: bool):
    """Return two rounds of rollouts, the groups with equal rewards left out, up to six trajectories."""
    batch = whole_batch()
    del batch["advantages"]
    batch["rewards"][batch["trajectory"] < 2] = 1.0  # the first group is equal
    for power in (2, 3):
        batch[f"component_reward.{power}"] = (batch["trajectory"] + 0.7) ** power % 5
    parts = [as_produced(batch, policy, everywhere) for _ in range(2)]
    return join([keep_informative(part, 2) for part in parts], 8), statistics(parts, 2)


def of_all(batch, keys):
    """Return these keys of all sequences."""
    return gathered(batch, keys) if dist.get_world_size() > 1 else {key: batch[key] for key in keys}


COVARIANCES = {
    "clip-cov": {"use_clip_cov": True, "clip_cov_min": 0.0, "clip_cov_max": 1e9, "clip_cov_ratio": 0.1},
    "kl-cov": {"use_kl_cov": True, "kl_cov_ratio": 0.1},
}


def grpo_step(parallel, batching, estimator, everywhere=False, covariances="none"):
    """Return the metrics of a GRPO step, its advantages, the weights behind it, and the gradient of all rollouts."""
    policy = build_policy(parallel, batching=batching)
    policy.freeze_reference()
    algorithm = GRPOConfig(samples_per_prompt=2, advantage_estimator=estimator)
    in_reward = estimator == "reinforce_plus_plus"
    settings = {"reference_policy_kl_penalty": 0.05, "use_kl_in_reward": in_reward}
    loss = build_loss("clipped_pg", settings | COVARIANCES.get(covariances, {}))
    drawn, outcome = rollouts(policy, everywhere)
    batch = policy.distribute(drawn, drawn.trajectories.step_sizes(3), group_for_owners(drawn, algorithm))
    batch = add_logprobs(batch, policy, recompute=True, reference=True)
    batch["advantages"] = estimate_advantages(batch, algorithm, loss)
    batch = add_covariance_mask(batch, loss, seed=5)
    found = outcome | learned_statistics(batch, 7) | logprob_mismatch(batch) | reward_kl(batch, loss)
    policy.accumulate_gradients(batch, loss)
    of_whole = gradients(policy)
    sizes = torch.bincount(batch.trajectories.owner // 3).tolist()
    report = policy.train(batch, loss, sizes=sizes)
    keys = ["advantages"] + ["covariance_mask"] * (covariances in COVARIANCES)
    return report | found, of_all(batch, keys), weights(policy), of_whole


def ppo_step(parallel, batching, everywhere=False):
    """Return the metrics, advantages and returns, the critic's weights, and its gradient of the whole rollout."""
    policy = build_policy(parallel, batching=batching)
    critic = build_policy(parallel, batching=batching, head="score")
    loss = build_loss("clipped_pg", {"reference_policy_kl_penalty": 0.05, "use_kl_in_reward": True})
    policy.freeze_reference()
    drawn, outcome = rollouts(policy, everywhere)
    batch = policy.distribute(drawn, drawn.trajectories.step_sizes(3), whole_trajectories(drawn))
    batch = add_logprobs(batch, policy, recompute=True, reference=True)
    batch["values"] = critic.get_values(batch)["values"]
    batch = add_advantages(batch, PPOConfig(gae_lambda=0.9, discount=0.95), loss)
    found = outcome | learned_statistics(batch, 7)
    value_loss = build_loss("mse_value", {"cliprange": 0.2})
    critic.accumulate_gradients(batch, value_loss)
    of_whole = gradients(critic)
    report = critic.train(batch, value_loss, sizes=torch.bincount(batch.trajectories.owner // 3).tolist())
    return report | found, of_all(batch, ["advantages", "returns", "values"]), weights(critic), of_whole


def assert_equal(found, wanted):
    for name in wanted[0].keys() - {"packing_efficiency"}:  # it depends on the microbatches
        assert found[0][name] == pytest.approx(wanted[0][name], rel=1e-4, abs=1e-5), name
    for key, values in wanted[1].items():
        assert (found[1][key] - values).abs().max() <= ADVANTAGE_TOLERANCE, key
    for ours, theirs in zip(found[2:], wanted[2:], strict=True):
        error, name = worst_relative_error(ours, theirs)
        assert error <= GRADIENT_TOLERANCE, (name, error)


# Every estimator in every layout, with the two places of rollouts in turn. The nightly tier has all triples.
CASES = [
    pytest.param(
        layout,
        estimator,
        everywhere,
        marks=() if (row + column) % 2 == everywhere else pytest.mark.nightly,
        id=f"{layout}-{'own' if estimator == OWN else estimator}-{'every replica' if everywhere else 'rank 0'}",
    )
    for row, layout in enumerate(LAYOUTS)
    for column, estimator in enumerate(ESTIMATORS)
    for everywhere in (False, True)
]


@pytest.mark.parametrize(("layout", "estimator", "everywhere"), CASES)
def test_a_step_of_grpo_equals_one_process(ranks, layout, estimator, everywhere):
    size, parallel = LAYOUTS[layout]
    whole = ranks.reference(grpo_step, {}, Batching(sequences=32), estimator)
    for found in ranks.run(size, grpo_step, parallel, PACKED, estimator, everywhere)[:1]:
        assert_equal(found, whole)


@pytest.mark.parametrize("covariances", COVARIANCES)
@pytest.mark.parametrize("layout", ["data 3", "data 2 context 2"])
def test_the_tokens_that_covariances_select_are_those_of_one_process(ranks, layout, covariances):
    size, parallel = LAYOUTS[layout]
    whole = ranks.reference(grpo_step, {}, Batching(sequences=32), "group_relative", False, covariances)
    found = ranks.run(size, grpo_step, parallel, PACKED, "group_relative", True, covariances)[0]
    assert_equal(found, whole)
    assert whole[0]["covariance_fraction"] == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_ppo_equals_one_process(ranks, layout):
    size, parallel = LAYOUTS[layout]
    whole = ranks.reference(ppo_step, {}, Batching(sequences=32))
    assert_equal(ranks.run(size, ppo_step, parallel, PACKED, True)[0], whole)

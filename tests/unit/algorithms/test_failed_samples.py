"""A group with a sample that failed equals a group without it: advantages, loss and gradients."""

import pytest
import torch

from rl_megatron.algorithms.advantage_estimators import ADVANTAGES, estimate_advantages
from rl_megatron.algorithms.ppo import add_advantages
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.trajectory_index import TRAJECTORY
from rl_megatron.config.algorithms import GRPOConfig, OnlineDPOConfig, PPOConfig
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import build_loss
from rl_megatron.rollouts.batch import TURN, TURN_REWARDS
from rl_megatron.rollouts.sampler import keep_informative
from rl_megatron.rollouts.statistics import informative_groups, statistics
from tests.unit.algorithms.fakes import whole

SIZE, WIDTH, VOCABULARY = 4, 9, 11
FAILED = (2, 4, 11)  # one sample of each group of four, at other places
OPTIONS = [{}, {"leave_one_out": True}, {"normalize_std": False}, {"leave_one_out": True, "normalize_std": False}]
CASES = [
    (name, options)
    for name in ADVANTAGES
    for options in (
        OPTIONS if name in ("group_relative", "group_relative_turns") else OPTIONS[::2][: 1 + ("steps" in name)]
    )
]


def rollouts(num_groups=3):
    """Return samples of two turns each, some of them without the second one, with every key that an estimator reads."""
    generator = torch.Generator().manual_seed(3)
    count = num_groups * SIZE
    lengths = torch.randint(5, WIDTH + 1, (count,), generator=generator)
    places = torch.arange(WIDTH)
    second = (torch.arange(count) % 3 != 1)[:, None]
    first_turn = ((places >= 1) & (places < 3)).expand(count, WIDTH)
    turn = torch.where(first_turn, 0, torch.where(second & (places >= 4) & (places < lengths[:, None]), 1, -1))
    mask = (turn >= 0).float()
    turn_rewards = torch.zeros(count, WIDTH)
    turn_rewards[:, 2] = torch.rand(count, generator=generator)
    uniform = lambda *shape: torch.rand(*shape, generator=generator)  # noqa: E731
    return BatchedDataDict(
        {
            "input_ids": torch.randint(0, VOCABULARY, (count, WIDTH), generator=generator),
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": torch.ones(count),
            "rewards": uniform(count) + 1,
            "stopped": torch.ones(count, dtype=torch.bool),
            "prev_logprobs": -uniform(count, WIDTH) * mask,
            "reference_policy_logprobs": -uniform(count, WIDTH) * mask,
            "generation_logprobs": -uniform(count, WIDTH) * mask,
            "temperature": torch.ones(count),
            "values": uniform(count, WIDTH) * mask,
            TRAJECTORY: torch.arange(count),
            TURN: turn,
            TURN_REWARDS: turn_rewards,
            "component_reward.first": uniform(count),
            "component_reward.second": uniform(count) * 10,
        }
    )


def with_failures(batch, failed=FAILED):
    """Return the samples with some that failed, as a rollout has them."""
    batch = batch.map_values(lambda values: values.clone(), list)
    failed = list(failed)
    for key in ("token_mask", "sample_mask", "rewards", "prev_logprobs", "generation_logprobs", TURN_REWARDS):
        batch[key][failed] = 0.0
    batch[TURN][failed] = -1
    for key in ("component_reward.first", "component_reward.second"):
        batch[key][failed] = torch.nan
    return batch


def without(batch, failed=FAILED):
    return batch.select_indices([number for number in range(batch.size) if number not in failed])


def loss_of(batch, advantages, settings, logits):
    """Return the loss of a batch and its gradient with respect to the logits."""
    logits = logits.clone().requires_grad_()
    mask = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
    loss, _ = build_loss("clipped_pg", settings)(
        logits, {**batch, "advantages": advantages}, batch["sample_mask"].sum(), mask.sum()
    )
    loss.backward()
    return loss.item(), logits.grad


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_group_with_a_failed_sample_equals_a_smaller_group(name, options):
    every = rollouts()
    logits = torch.randn(every.size, WIDTH, VOCABULARY, generator=torch.Generator().manual_seed(5))
    kept = [number for number in range(every.size) if number not in FAILED]
    in_reward = name == "reinforce_plus_plus"
    for token_level in (True, False):
        settings = {
            "reference_policy_kl_penalty": 0.1, "use_kl_in_reward": in_reward, "token_level_loss": token_level,
        }  # fmt: skip
        found = []
        for batch, size, own in (
            (with_failures(every), SIZE, logits),
            (without(every), SIZE - 1, logits[kept]),
        ):
            algorithm = GRPOConfig(samples_per_prompt=size, advantage_estimator=name, **options)
            advantages = estimate_advantages(Batch.from_whole(batch), algorithm, build_loss("clipped_pg", settings))
            found.append((advantages, *loss_of(batch, advantages, settings, own)))
        (advantages, loss, gradient), (wanted, loss_wanted, gradient_wanted) = found
        assert wanted.count_nonzero() > 10
        # Sums over tokens have other orders of their terms.
        rounding = {"rtol": 0.0, "atol": 0.0 if name == "group_relative" else 1e-6}
        torch.testing.assert_close(advantages[kept], wanted, **rounding)
        assert loss == pytest.approx(loss_wanted, rel=1e-6)
        torch.testing.assert_close(gradient[kept], gradient_wanted, rtol=1e-5, atol=1e-8)
        assert gradient_wanted.any()
        assert not advantages[list(FAILED)].any() and not gradient[list(FAILED)].any()


@pytest.mark.parametrize("failed", [(2,), (0, 1), (5, 6, 9), (0, 4, 5, 6, 7)])
def test_groups_of_several_sizes_are_each_compared_alone(failed):
    """The last case leaves the second group without a sample."""
    every = rollouts()
    found = estimate_advantages(whole(with_failures(every, failed)), GRPOConfig(samples_per_prompt=SIZE), None)
    for first in range(0, every.size, SIZE):
        kept = [number for number in range(first, first + SIZE) if number not in failed]
        if kept:
            alone = estimate_advantages(
                whole(every.select_indices(kept)), GRPOConfig(samples_per_prompt=len(kept)), None
            )
            assert torch.equal(found[kept], alone)


def test_ppo_whitens_over_the_samples_that_did_not_fail():
    every, loss = rollouts(), build_loss("clipped_pg")
    kept = [number for number in range(every.size) if number not in FAILED]
    found = add_advantages(whole(with_failures(every)), PPOConfig(), loss)
    wanted = add_advantages(whole(without(every)), PPOConfig(), loss)
    for key in ("advantages", "returns"):
        assert torch.equal(found[key][kept], wanted[key]) and not found[key][list(FAILED)].any()


def test_the_zero_of_a_failed_sample_makes_no_group_informative():
    every = rollouts()
    every["rewards"][:SIZE] = 1.0
    batch = with_failures(every)
    assert informative_groups(batch["rewards"], SIZE).all(), "rewards alone differ"
    assert informative_groups(batch["rewards"], SIZE, batch["sample_mask"]).tolist() == [False, True, True]
    assert keep_informative(Batch.from_whole(batch), SIZE).trajectories.num_trajectories == 2 * SIZE
    found = statistics([whole(batch)], SIZE)
    assert found["informative_groups"] == pytest.approx(2 / 3)
    assert found["reward"] == pytest.approx(without(every)["rewards"].mean().item())


def test_every_estimator_of_the_package_leaves_failed_samples_out():
    for name in ADVANTAGES:
        load_config(["algorithm=grpo", "rollout.on_failure=mask_sample", f"algorithm.advantage_estimator={name}"])


def test_algorithms_name_how_many_samples_they_compare():
    assert PPOConfig().least_samples == 1
    assert OnlineDPOConfig().least_samples == 2
    for name in ADVANTAGES:
        least = GRPOConfig(advantage_estimator=name).least_samples
        assert least == (1 if name == "reinforce_plus_plus" else 2), name
    assert GRPOConfig(advantage_estimator="reinforce_plus_plus", dynamic_sampling=True).least_samples == 2

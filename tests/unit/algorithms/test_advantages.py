"""Advantages against their closed forms."""

import math

import pytest
import torch

from rl_megatron.algorithms.advantages import group_relative, informative_groups

REWARDS = [1.0, 0.0, 0.0, 0.0, 3.0, 5.0, 1.0, 3.0]  # two groups of four


def closed_form(rewards, leave_one_out, normalize_std):
    size = len(rewards)
    mean = sum(rewards) / size
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (size - 1))
    baselines = [(sum(rewards) - r) / (size - 1) if leave_one_out else mean for r in rewards]
    return [(r - b) / (deviation + 1e-6 if normalize_std else 1.0) for r, b in zip(rewards, baselines, strict=True)]


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize_std", [False, True])
def test_closed_form_of_every_choice(leave_one_out, normalize_std):
    found = group_relative(torch.tensor(REWARDS), 4, leave_one_out=leave_one_out, normalize_std=normalize_std)
    wanted = closed_form(REWARDS[:4], leave_one_out, normalize_std) + closed_form(
        REWARDS[4:], leave_one_out, normalize_std
    )
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)


def test_the_defaults_are_the_mean_and_the_standard_deviation():
    assert torch.equal(
        group_relative(torch.tensor(REWARDS), 4),
        group_relative(torch.tensor(REWARDS), 4, leave_one_out=False, normalize_std=True),
    )


def test_a_pair_by_hand():
    """r = (1, 0): mean 1/2, deviation 1/√2; the other sample of the pair is the leave-one-out baseline."""
    pair = torch.tensor([1.0, 0.0])
    assert group_relative(pair, 2).tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)
    assert group_relative(pair, 2, normalize_std=False).tolist() == [0.5, -0.5]
    assert group_relative(pair, 2, leave_one_out=True, normalize_std=False).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("size", [2, 3, 7])
def test_leave_one_out_is_the_mean_baseline_rescaled(size):
    """r_i − mean of the others = n/(n−1) · (r_i − mean)."""
    rewards = torch.randn(4 * size, generator=torch.Generator().manual_seed(size))
    rloo = group_relative(rewards, size, leave_one_out=True, normalize_std=False)
    mean = group_relative(rewards, size, normalize_std=False)
    torch.testing.assert_close(rloo, mean * size / (size - 1))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -7.3, 1e6])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("normalize_std", [False, True])
def test_equal_rewards_give_exactly_zero(reward, leave_one_out, normalize_std):
    found = group_relative(torch.full((21,), reward), 7, leave_one_out=leave_one_out, normalize_std=normalize_std)
    assert torch.equal(found, torch.zeros(21))


def test_groups_are_independent():
    alone = group_relative(torch.tensor(REWARDS[:4]), 4)
    for others in ([0.0] * 4, [1e6, 0.0, 0.0, 0.0], [5.0] * 4):
        assert torch.equal(group_relative(torch.tensor(REWARDS[:4] + others), 4)[:4], alone)


def test_the_order_within_a_group_follows_the_samples():
    order = torch.tensor([2, 0, 3, 1])
    rewards = torch.tensor(REWARDS[4:])
    torch.testing.assert_close(group_relative(rewards[order], 4), group_relative(rewards, 4)[order])


def test_shifts_and_with_the_deviation_scales_do_not_matter():
    rewards = torch.tensor(REWARDS)
    torch.testing.assert_close(group_relative(rewards * 4 - 2, 4), group_relative(rewards, 4), rtol=1e-4, atol=1e-5)


def test_rewards_that_make_no_groups_are_refused():
    with pytest.raises(ValueError, match="7 rewards do not make groups of 4"):
        group_relative(torch.zeros(7), 4)


def test_informative_groups_are_those_whose_rewards_differ():
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.3, 0.3])
    assert informative_groups(rewards, 2).tolist() == [False, False, True, True, False]
    assert informative_groups(rewards[:9], 3).tolist() == [True, True, True]

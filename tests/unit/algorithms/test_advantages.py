"""Advantages compared with their closed forms."""

import math

import pytest
import torch

from rl_megatron.algorithms.advantages import (
    generalized_advantages,
    group_decoupled,
    group_relative,
    optimal_baseline,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
    whiten,
)
from rl_megatron.rollouts.statistics import informative_groups

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


def test_rewards_that_do_not_form_groups_are_refused():
    with pytest.raises(ValueError, match="7 rewards do not form groups of 4"):
        group_relative(torch.zeros(7), 4)


def test_informative_groups_are_those_whose_rewards_differ():
    rewards = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.3, 0.3])
    assert informative_groups(rewards, 2).tolist() == [False, False, True, True, False]
    assert informative_groups(rewards[:9], 3).tolist() == [True, True, True]


MASK = torch.tensor(
    [
        [0, 1, 1, 1, 1, 1, 1],  # a prompt of one token
        [0, 1, 1, 0, 0, 1, 1],  # a tool's output in between
        [0, 0, 1, 0, 1, 0, 0],  # gaps and padding
        [0, 0, 0, 0, 0, 0, 1],  # one token
        [0, 0, 0, 0, 0, 0, 0],  # none
    ]
)


def drawn(seed, shape=MASK.shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kept_of(row, mask):
    return [float(value) for value, kept in zip(row, mask, strict=True) if kept]


def spread(kept, mask):
    """The values of `kept`, one per masked-in position; 0 elsewhere."""
    values = iter(kept)
    return [next(values) if m else 0.0 for m in mask]


def slow_advantages(rewards, values, discount, gae_lambda):
    """A_t = Σ_l (γλ)^l δ_{t+l}, term by term, of one sequence without gaps."""
    ahead = [*values, 0.0][1:]
    deltas = [r + discount * n - v for r, n, v in zip(rewards, ahead, values, strict=True)]
    return [
        sum((discount * gae_lambda) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("elsewhere", [0.0, 7.0, math.nan, math.inf])
def test_generalized_advantages_are_the_discounted_sum_of_td_errors(discount, gae_lambda, elsewhere):
    rewards, values = (torch.where(MASK != 0, drawn(seed), elsewhere) for seed in (0, 1))
    advantages, returns = generalized_advantages(rewards, values, MASK, discount=discount, gae_lambda=gae_lambda)
    for b, mask in enumerate(MASK.tolist()):
        kept_values = kept_of(values[b], mask)
        wanted = slow_advantages(kept_of(rewards[b], mask), kept_values, discount, gae_lambda)
        assert advantages[b].tolist() == pytest.approx(spread(wanted, mask), abs=1e-5)
        wanted_returns = [a + v for a, v in zip(wanted, kept_values, strict=True)]
        assert returns[b].tolist() == pytest.approx(spread(wanted_returns, mask), abs=1e-5)


def test_generalized_advantages_by_hand():
    """γ = ½, λ = ½, V = (4, 2), r = (1, 8): δ_2 = 8 − 2 = 6, δ_1 = 1 + ½·2 − 4 = −2, A_1 = −2 + ¼·6."""
    rewards, values, mask = torch.tensor([[9.0, 1, 9, 8]]), torch.tensor([[9.0, 4, 9, 2]]), torch.tensor([[0, 1, 0, 1]])
    advantages, returns = generalized_advantages(rewards, values, mask, discount=0.5, gae_lambda=0.5)
    assert advantages.tolist() == [[0, -0.5, 0, 6]]
    assert returns.tolist() == [[0, 3.5, 0, 8]]


def test_with_lambda_1_the_returns_do_not_depend_on_the_critic():
    rewards = drawn(2)
    found = [generalized_advantages(rewards, v, MASK, discount=0.9, gae_lambda=1.0)[1] for v in (drawn(3), drawn(4))]
    torch.testing.assert_close(*found)


def test_a_perfect_critic_leaves_no_advantage():
    """V_t = Σ of the rewards to come: nothing surprises, whatever λ is."""
    rewards = torch.where(MASK != 0, drawn(5), 0.0)
    values = rewards.flip(1).cumsum(1).flip(1)
    for gae_lambda in (0.0, 0.5, 1.0):
        advantages, returns = generalized_advantages(rewards, values, MASK, discount=1.0, gae_lambda=gae_lambda)
        torch.testing.assert_close(advantages, torch.zeros(MASK.shape), atol=1e-5, rtol=0)
        torch.testing.assert_close(returns, torch.where(MASK != 0, values, 0.0), atol=1e-5, rtol=0)


def test_advantages_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"rewards \(5,\), values \(5, 7\) and mask \(5, 7\)"):
        generalized_advantages(drawn(0)[:, 0], drawn(1), MASK, discount=1.0, gae_lambda=1.0)


@pytest.mark.parametrize("elsewhere", [0.0, math.nan, 1e9])
def test_whitening_is_over_the_tokens_of_all_sequences(elsewhere):
    advantages = torch.where(MASK != 0, 3 + 5 * drawn(6), elsewhere)
    kept = [value for row, mask in zip(advantages, MASK.tolist(), strict=True) for value in kept_of(row, mask)]
    mean = sum(kept) / len(kept)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in kept) / (len(kept) - 1))
    found = whiten(advantages, MASK)
    assert found[MASK != 0].tolist() == pytest.approx([(value - mean) / deviation for value in kept], rel=1e-4)
    assert torch.equal(found[MASK == 0], torch.zeros(int((MASK == 0).sum())))


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -7.3, 1e6])
def test_equal_advantages_whiten_to_exactly_0(value):
    assert torch.equal(whiten(torch.full(MASK.shape, value), MASK), torch.zeros(MASK.shape))


@pytest.mark.parametrize("row", [3, 4], ids=["one token", "none"])
def test_fewer_than_two_tokens_whiten_to_0(row):
    assert torch.equal(whiten(drawn(7)[[row]], MASK[[row]]), torch.zeros(1, MASK.shape[1]))


@pytest.mark.parametrize("elsewhere", [0.0, math.nan, math.inf])
def test_the_score_comes_with_the_last_token_and_the_penalty_with_each(elsewhere):
    scores, kl = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), torch.where(MASK != 0, drawn(8), elsewhere)
    found = token_rewards(scores, MASK, kl, 0.5)
    for b, mask in enumerate(MASK.tolist()):
        wanted = [-0.5 * value for value in kept_of(kl[b], mask)]
        if wanted:
            wanted[-1] += scores[b].item()
        assert found[b].tolist() == pytest.approx(spread(wanted, mask))


def test_without_a_penalty_only_the_score_remains():
    found = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan]), MASK, None, 0.5)
    assert found.nonzero().tolist() == [[0, 6], [1, 6], [2, 4], [3, 6]]
    assert found.sum(1).tolist() == [1, 2, 3, 4, 0], "a sequence without a token has no reward"


def test_rewards_of_other_shapes_are_refused():
    for scores, kl in ((drawn(0), None), (drawn(0)[0], None), (drawn(0)[:, 0], drawn(1)[:, 1:])):
        with pytest.raises(ValueError, match=r"mask of \(5, 7\)"):
            token_rewards(scores, MASK, kl, 0.1)


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_reinforce_plus_plus_whitens_the_returns_to_go(discount):
    rewards = drawn(9)
    returns = torch.zeros(MASK.shape)
    for b, mask in enumerate(MASK.tolist()):
        kept = kept_of(rewards[b], mask)
        to_go = [sum(discount ** (i - t) * kept[i] for i in range(t, len(kept))) for t in range(len(kept))]
        returns[b] = torch.tensor(spread(to_go, mask))
    found = reinforce_plus_plus(rewards, MASK, discount=discount)
    torch.testing.assert_close(found, whiten(returns, MASK), rtol=1e-4, atol=1e-5)
    if discount == 1.0:
        assert torch.equal(reinforce_plus_plus(rewards, MASK), found)


def test_the_score_of_a_sequence_is_the_return_of_each_of_its_tokens():
    """Without discount and penalty every token of a sequence has the sequence's score as its return."""
    mask = torch.ones(2, 3)
    found = reinforce_plus_plus(token_rewards(torch.tensor([1.0, 0.0]), mask, None, 0.0), mask)
    assert found.tolist() == [pytest.approx([math.sqrt(5 / 6)] * 3), pytest.approx([-math.sqrt(5 / 6)] * 3)]


NUM_SAMPLED = [1, 3, 2, 4, 2, 2, 0, 1]
SAMPLED = (torch.arange(5) < torch.tensor(NUM_SAMPLED)[:, None]).float()


def test_the_optimal_baseline_weights_rewards_by_length():
    found = optimal_baseline(torch.tensor(REWARDS), 4, SAMPLED)
    weighted = [length * reward for length, reward in zip(NUM_SAMPLED, REWARDS, strict=True)]
    baselines = [sum(weighted[i : i + 4]) / sum(NUM_SAMPLED[i : i + 4]) for i in (0, 4)]
    assert found.tolist() == pytest.approx([r - baselines[i // 4] for i, r in enumerate(REWARDS)], rel=1e-6)


def test_the_optimal_baseline_of_equal_rewards_or_of_no_tokens_gives_exactly_zero():
    equal = optimal_baseline(torch.full((8,), 0.1), 4, SAMPLED)
    silent = optimal_baseline(torch.tensor(REWARDS), 4, torch.zeros_like(SAMPLED))
    assert torch.equal(equal, torch.zeros(8)) and torch.equal(silent, torch.zeros(8))


def test_reinforce_plus_plus_baseline_whitens_differences_from_the_groups_over_all_tokens():
    found = reinforce_plus_plus_baseline(torch.tensor(REWARDS), 4, SAMPLED)
    centred = [r - sum(REWARDS[i // 4 * 4 :][:4]) / 4 for i, r in enumerate(REWARDS)]
    tokens = [value for value, length in zip(centred, NUM_SAMPLED, strict=True) for _ in range(length)]
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1))
    wanted = torch.tensor([(value - mean) / deviation for value in centred])[:, None] * SAMPLED
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_rewards_are_normalised_one_by_one_before_they_are_added_up():
    """The second function's scores are a thousand times larger, and its weight decides alone."""
    scores = torch.tensor([[1.0, 2000.0], [0.0, 5000.0], [0.0, 2000.0], [1.0, 1000.0]])
    found = group_decoupled(scores, torch.tensor([1.0, 0.5]), 4)
    summed = [0.0] * 4
    for function, weight in ((0, 1.0), (1, 0.5)):
        values = scores[:, function].tolist()
        mean = sum(values) / 4
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / 3)
        summed = [total + weight * (value - mean) / deviation for total, value in zip(summed, values, strict=True)]
    deviation = math.sqrt(sum(total**2 for total in summed) / 3)
    assert found.tolist() == pytest.approx([total / deviation for total in summed], rel=1e-4)


def test_scores_that_are_missing_or_equal_add_nothing():
    nan = math.nan
    missing = torch.tensor([[1.0, nan], [0.0, nan], [nan, nan], [1.0, 7.0]])
    found = group_decoupled(missing, torch.ones(2), 4)
    assert found[2] == 0 and found[0] == found[3] > 0 > found[1]
    equal = torch.full((4, 2), 0.1)
    assert torch.equal(group_decoupled(equal, torch.ones(2), 4), torch.zeros(4))
    assert torch.equal(group_decoupled(equal * nan, torch.ones(2), 4), torch.zeros(4))

"""Advantages of turns compared with loops over samples and turns."""

import statistics

import pytest
import torch

from rl_megatron.algorithms.advantages import group_relative, group_relative_steps, group_relative_turns

# Two groups of three samples. A sample is its turns, and a turn is the rewards of its tokens.
SAMPLES = [
    [[0.0, 1.0], [0.5]], [[0.0], [0.0, 2.0], [1.0]], [[-1.0]],
    [[0.25, 0.25], [0.5]], [[0.5], [0.0, 0.5]], [[0.5], [0.5]],
]  # fmt: skip
SIZE = 3


def tensors(samples):
    """Return the rewards and the numbers of turns. A token of somebody else stands before each turn."""
    rewards, turns = torch.full((len(samples), 9), torch.nan), torch.full((len(samples), 9), -1)
    for sample, parts in enumerate(samples):
        place = 0
        for number, tokens in enumerate(parts):
            place += 1
            rewards[sample, place : place + len(tokens)] = torch.tensor(tokens)
            turns[sample, place : place + len(tokens)] = number
            place += len(tokens)
    return rewards, turns


def scaled(values, value, baseline, normalize):
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return 0.0 if len(set(values)) == 1 else (value - baseline) / (deviation + 1e-6 if normalize else 1.0)


def by_turns(samples, leave_one_out, normalize):
    """Return the advantage of each turn of each sample."""
    found = []
    for number, sample in enumerate(samples):
        group = samples[number // SIZE * SIZE : number // SIZE * SIZE + SIZE]
        found.append([])
        for k in range(len(sample)):
            returns = [sum(map(sum, other[k:])) for other in group if len(other) > k]
            own = sum(map(sum, sample[k:]))
            left = len(returns) - 1
            baseline = (sum(returns) - own) / max(left, 1) if leave_one_out else statistics.mean(returns)
            found[-1].append(scaled(returns, own, baseline, normalize))
    return found


def by_steps(samples, normalize):
    found = []
    for number, sample in enumerate(samples):
        group = samples[number // SIZE * SIZE : number // SIZE * SIZE + SIZE]
        every = [sum(turn) for other in group for turn in other]
        scores = [scaled(every, sum(turn), statistics.mean(every), normalize) for turn in sample]
        found.append([sum(scores[k:]) for k in range(len(scores))])
    return found


def at_tokens(advantages, turns):
    return [
        [advantages[sample][turn] if turn >= 0 else 0.0 for turn in line] for sample, line in enumerate(turns.tolist())
    ]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_turns_are_compared_with_the_same_turn_of_their_group(leave_one_out, normalize):
    rewards, turns = tensors(SAMPLES)
    found = group_relative_turns(rewards, turns, SIZE, leave_one_out=leave_one_out, normalize_std=normalize)
    wanted = at_tokens(by_turns(SAMPLES, leave_one_out, normalize), turns)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    assert found[1, 5] == 0.0 and (found[:3] != 0).any() and (found[3:] == 0).all()


@pytest.mark.parametrize("normalize", [True, False])
def test_steps_are_compared_with_all_steps_of_their_group(normalize):
    rewards, turns = tensors(SAMPLES)
    found = group_relative_steps(rewards, turns, SIZE, normalize_std=normalize)
    wanted = at_tokens(by_steps(SAMPLES, normalize), turns)
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    assert (found[:3] != 0).any() and (found[3:] == 0).all()


@pytest.mark.parametrize("function", [group_relative_turns, group_relative_steps])
def test_one_turn_each_is_group_relative(function):
    rewards, turns = tensors([[sample[0]] for sample in SAMPLES])
    wanted = group_relative(torch.tensor([sum(sample[0]) for sample in SAMPLES]), SIZE)
    torch.testing.assert_close(function(rewards, turns, SIZE), torch.where(turns == 0, wanted[:, None], 0.0))


@pytest.mark.parametrize("function", [group_relative_turns, group_relative_steps])
def test_advantages_are_divided_by_the_deviation_unless_told_otherwise(function):
    rewards, turns = tensors(SAMPLES)
    divided, centred = (function(rewards, turns, SIZE, normalize_std=normalize) for normalize in (True, False))
    assert torch.equal(function(rewards, turns, SIZE), divided) and not torch.equal(divided, centred)


def test_samples_that_form_no_whole_groups_are_refused():
    rewards, turns = tensors(SAMPLES)
    with pytest.raises(ValueError, match="6 token_rewards do not form groups of 4"):
        group_relative_turns(rewards, turns, 4)

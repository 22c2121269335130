"""Advantages of turns: how much better a turn was than turns of other samples of its prompt.

Tensors of tokens are [B, S], and entry t corresponds to token t. `turns` is the number of the turn at each sampled
token, and -1 elsewhere; samples of a prompt are contiguous. The reward of a turn is the sum over its tokens.
Without turns, every sample has one turn, and all of these advantages are those of `group_relative`.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.batching.config import check_groups

_EPSILON = 1e-6  # prevents division by zero among nearly equal rewards


def group_relative_turns(
    token_rewards: Float[Tensor, "batch sequence"],
    turns: Int[Tensor, "batch sequence"],
    group_size: int,
    *,
    leave_one_out: bool = False,
    normalize_std: bool = True,
) -> Float[Tensor, "batch sequence"]:
    """Return A_ik = (G_ik − b_k) / (σ_k + ε), where G_ik is the sum of the rewards of sample i from turn k on.

    b_k and σ_k are the mean and the sample standard deviation of G_jk over the samples j of the group that have a turn
    k; with `leave_one_out`, b_k leaves out sample i itself. If all G_jk are equal, or only one sample has a turn k, its
    advantage is exactly 0.

    Shapes: token_rewards and turns are [B, S], with B = num_groups · group_size; the result is [B, S] fp32.
    Source: the outcome supervision of GRPO, arXiv:2402.03300 §4.1.2, applied to the returns of each turn.

    Args:
        token_rewards: The rewards of tokens.
        turns: The numbers of turns.
        group_size: The number of samples per prompt.
        leave_one_out: Whether a sample's baseline leaves out its own return.
        normalize_std: Whether to divide by the standard deviation.

    Raises:
        ValueError: The samples do not form whole groups.
    """
    rewards, exists = _rewards_of_turns(token_rewards, turns, group_size)
    returns = _sums_to_the_end(rewards)
    count = exists.sum(1, keepdim=True)
    total = torch.where(exists, returns, 0.0).sum(1, keepdim=True)
    if leave_one_out:
        centred = returns - (total - returns) / (count - 1).clamp(min=1)
    else:
        centred = returns - total / count.clamp(min=1)
    if normalize_std:
        centred = centred / (_deviation(returns, exists, 1) + _EPSILON)
    advantages = torch.where(_all_equal(returns, exists, 1), 0.0, centred)
    return _at_tokens(advantages.flatten(0, 1), turns)


def group_relative_steps(
    token_rewards: Float[Tensor, "batch sequence"],
    turns: Int[Tensor, "batch sequence"],
    group_size: int,
    *,
    normalize_std: bool = True,
) -> Float[Tensor, "batch sequence"]:
    """Return A_ik = Σ_{l ≥ k} (r_il − b) / (σ + ε), where r_il is the reward of turn l of sample i.

    b and σ are the mean and the sample standard deviation of the rewards of all turns of the group. If they are all
    equal, advantages are exactly 0.

    Shapes: token_rewards and turns are [B, S], with B = num_groups · group_size; the result is [B, S] fp32.
    Source: the process supervision of GRPO, arXiv:2402.03300 §4.1.3.

    Args:
        token_rewards: The rewards of tokens.
        turns: The numbers of turns.
        group_size: The number of samples per prompt.
        normalize_std: Whether to divide by the standard deviation.

    Raises:
        ValueError: The samples do not form whole groups.
    """
    rewards, exists = _rewards_of_turns(token_rewards, turns, group_size)
    every = (1, 2)
    count = exists.sum(every, keepdim=True).clamp(min=1)
    centred = rewards - torch.where(exists, rewards, 0.0).sum(every, keepdim=True) / count
    if normalize_std:
        centred = centred / (_deviation(rewards, exists, every) + _EPSILON)
    centred = torch.where(exists & ~_all_equal(rewards, exists, every), centred, 0.0)
    return _at_tokens(_sums_to_the_end(centred).flatten(0, 1), turns)


def _rewards_of_turns(
    token_rewards: Float[Tensor, "batch sequence"], turns: Int[Tensor, "batch sequence"], group_size: int
) -> tuple[Float[Tensor, "groups size turns"], Bool[Tensor, "groups size turns"]]:
    """Return the reward of each turn, and which turns there are."""
    check_groups(group_size, token_rewards=token_rewards, turns=turns)
    if token_rewards.shape != turns.shape:
        raise ValueError(f"token_rewards {tuple(token_rewards.shape)} and turns {tuple(turns.shape)} must be [B, S]")
    most = max(int(turns.max()) + 1, 1) if turns.numel() else 1
    sampled = turns >= 0
    place = turns.clamp(min=0)
    rewards = torch.zeros(turns.shape[0], most).scatter_add_(1, place, torch.where(sampled, token_rewards.float(), 0.0))
    exists = torch.zeros(turns.shape[0], most).scatter_add_(1, place, sampled.float()) > 0
    shape = (-1, group_size, most)
    return rewards.view(shape), exists.view(shape)


def _sums_to_the_end(values: Tensor) -> Tensor:
    """Return the sums of each entry and of those behind it in the last dimension."""
    return values.flip(-1).cumsum(-1).flip(-1)


def _deviation(values: Tensor, exists: Tensor, over: int | tuple[int, ...]) -> Tensor:
    """Return the sample standard deviation of the values that exist; 0 of fewer than two."""
    count = exists.sum(over, keepdim=True)
    mean = torch.where(exists, values, 0.0).sum(over, keepdim=True) / count.clamp(min=1)
    squares = torch.where(exists, (values - mean) ** 2, 0.0).sum(over, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _all_equal(values: Tensor, exists: Tensor, over: int | tuple[int, ...]) -> Tensor:
    """Return whether all values that exist are equal."""
    highest = torch.where(exists, values, -torch.inf).amax(over, keepdim=True)
    lowest = torch.where(exists, values, torch.inf).amin(over, keepdim=True)
    return highest <= lowest


def _at_tokens(
    values: Float[Tensor, "batch turns"], turns: Int[Tensor, "batch sequence"]
) -> Float[Tensor, "batch sequence"]:
    """Return the value of its turn at each sampled token, and 0 elsewhere."""
    return torch.where(turns >= 0, values.gather(1, turns.clamp(min=0)), 0.0)

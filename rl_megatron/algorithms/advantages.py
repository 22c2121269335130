"""Advantages: how much better a sample was than what could be expected."""

from __future__ import annotations

import torch
from torch import Tensor

_EPSILON = 1e-6  # keeps a group of nearly equal rewards from being divided by nothing


def group_relative(
    rewards: Tensor, group_size: int, *, leave_one_out: bool = False, normalize_std: bool = True
) -> Tensor:
    """A_i = (r_i − b_i) / (σ + ε) over groups of samples of one prompt.

    b_i is the group's mean, or with `leave_one_out` the mean of the *other* samples (RLOO; unbiased, as r_i does not
    enter its own baseline). σ is the group's sample standard deviation; without `normalize_std` it is left out
    (Dr. GRPO). A group of equal rewards gets exactly 0.

    Shapes: rewards [num_groups · group_size], groups contiguous → the same. Source: GRPO, arXiv 2402.03300 §4.1.2;
    RLOO, 2402.14740; Dr. GRPO, 2503.20783.
    """
    if rewards.numel() % group_size:
        raise ValueError(f"{rewards.numel()} rewards do not make groups of {group_size}")
    groups = rewards.float().view(-1, group_size)
    total = groups.sum(1, keepdim=True)
    baseline = (total - groups) / (group_size - 1) if leave_one_out else total / group_size
    centred = groups - baseline
    if normalize_std:
        centred = centred / (groups.std(1, keepdim=True) + _EPSILON)
    all_equal = (groups == groups[:, :1]).all(1, keepdim=True)
    return torch.where(all_equal, 0.0, centred).view(-1)


def informative_groups(rewards: Tensor, group_size: int) -> Tensor:
    """[num_groups] bool: groups whose rewards differ. Others have no gradient (DAPO's dynamic sampling drops them)."""
    groups = rewards.view(-1, group_size)
    return (groups != groups[:, :1]).any(1)

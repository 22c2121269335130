"""Advantages: how much better a sample, or a token, was than what could be expected.

Of token advantages all tensors are [B, S], entry t speaks of token t, and only entries with mask ≠ 0 count: what the
others hold (a prompt, a tool's output, padding) is not read, NaN included, and results are 0 there.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Real, Shaped
from torch import Tensor

_EPSILON = 1e-6  # keeps a group of nearly equal rewards from being divided by nothing
_WHITENING_EPSILON = 1e-8


def group_relative(
    rewards: Real[Tensor, " samples"], group_size: int, *, leave_one_out: bool = False, normalize_std: bool = True
) -> Float[Tensor, " samples"]:
    """Return A_i = (r_i − b_i) / (σ + ε) over groups of samples of one prompt.

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


def informative_groups(rewards: Real[Tensor, " samples"], group_size: int) -> Bool[Tensor, " samples//{group_size}"]:
    """Return which groups have rewards that differ. Others have no gradient (DAPO's dynamic sampling drops them)."""
    groups = rewards.view(-1, group_size)
    return (groups != groups[:, :1]).any(1)


def generalized_advantages(
    rewards: Float[Tensor, "batch sequence"],
    values: Float[Tensor, "batch sequence"],
    mask: Shaped[Tensor, "batch sequence"],
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Float[Tensor, "batch sequence"], Float[Tensor, "batch sequence"]]:
    """Return (A, A + V) with A_t = δ_t + γλ·A_next and δ_t = r_t + γ·V_next − V_t.

    `next` is the row's next token with mask ≠ 0; behind the last one V and A are 0. A + V estimates the return from
    token t on, which the critic learns. λ = 1 gives Σ γ^k·r − V_t, λ = 0 gives δ_t.

    Args:
        rewards: r_t, paid for token t.
        values: V_t, the critic's value of what stands before token t.
        discount: γ.
        gae_lambda: λ.

    Shapes: rewards, values, mask [B, S] → two of [B, S], fp32.
    Raises: ValueError where the shapes differ.
    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation"
        (arXiv:1506.02438), eq. 16.
    """
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} must have one "
            "shape [B, S]"
        )
    kept = mask != 0
    rewards, values = rewards.float(), values.float()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        surprise = rewards[:, t] + discount * next_value - values[:, t]
        next_advantage = torch.where(kept[:, t], surprise + discount * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(kept[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(kept[:, t], next_advantage, 0.0)
    return advantages, torch.where(kept, advantages + values, 0.0)


def whiten(
    advantages: Float[Tensor, "batch sequence"], mask: Shaped[Tensor, "batch sequence"]
) -> Float[Tensor, "batch sequence"]:
    """Return (A − mean) / (std + ε) over all tokens of the batch with mask ≠ 0; exactly 0 where all of them are equal.

    Shapes: advantages, mask [B, S] → [B, S], fp32. std is the sample standard deviation, as in `group_relative`.
    Source: Andrychowicz et al. 2021, "What matters for on-policy deep actor-critic methods?" (arXiv:2006.05990),
        advantage normalization.
    """
    kept = mask != 0
    chosen = advantages[kept].float()
    whitened = torch.zeros(advantages.shape, device=advantages.device)
    if (chosen != chosen[:1]).any():
        whitened[kept] = (chosen - chosen.mean()) / (chosen.std() + _WHITENING_EPSILON)
    return whitened


def token_rewards(
    scores: Real[Tensor, " batch"],
    mask: Shaped[Tensor, "batch sequence"],
    kl: Float[Tensor, "batch sequence"] | None,
    kl_coefficient: float,
) -> Float[Tensor, "batch sequence"]:
    """Return r_t = −β·kl_t, and the row's score on top at its last token with mask ≠ 0; a row without one gets nothing.

    Args:
        scores: one per row, in the units of the reward.
        kl: per-token estimates of KL(π‖π_ref), in nats; None for no penalty.
        kl_coefficient: β.

    Shapes: scores [B]; mask and kl [B, S] → [B, S], fp32.
    Raises: ValueError where the shapes disagree.
    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback"
        (arXiv:2203.02155), eq. 2.
    """
    if scores.shape != mask.shape[:1] or (kl is not None and kl.shape != mask.shape):
        raise ValueError(
            f"scores {tuple(scores.shape)} must be [B] and kl {None if kl is None else tuple(kl.shape)} [B, S] for a "
            f"mask of {tuple(mask.shape)}"
        )
    kept = mask != 0
    is_last = kept & (kept.flip(1).cumsum(1).flip(1) == 1)
    rewards = torch.where(is_last, scores.float()[:, None], 0.0)
    return rewards if kl is None else rewards - kl_coefficient * torch.where(kept, kl.float(), 0.0)


def reinforce_plus_plus(
    rewards: Float[Tensor, "batch sequence"], mask: Shaped[Tensor, "batch sequence"], *, discount: float = 1.0
) -> Float[Tensor, "batch sequence"]:
    """Return whiten(Σ_k γ^k·r_{t+k}): the return from token t on, against the mean of the whole batch; no critic.

    Shapes: rewards, mask [B, S] → [B, S], fp32.
    Source: Hu 2025, "REINFORCE++" (arXiv:2501.03262).
    """
    no_critic = torch.zeros_like(rewards)
    returns, _ = generalized_advantages(rewards, no_critic, mask, discount=discount, gae_lambda=1.0)
    return whiten(returns, mask)

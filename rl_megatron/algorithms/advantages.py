"""Advantages: how much better a sample or a token was than expected.

Tensors of token advantages are [B, S], and entry t corresponds to token t. Only entries with mask ≠ 0 count. Other
entries (a prompt, a tool's output, padding) are not read and may be NaN; their results are 0.

`turns` [B, S] is the turn's number at each sampled token, and -1 at all other tokens. The reward of a turn is the sum
of its tokens' rewards. If every sample has one turn, advantages of turns equal those of `group_relative`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Real, Shaped
from torch import Tensor

from rl_megatron.batching.config import check_groups
from rl_megatron.topology.reductions import ALONE, RankReduction

_EPSILON = 1e-6  # prevents division by zero in a group of nearly equal rewards
_WHITENING_EPSILON = 1e-8


def group_relative(
    rewards: Real[Tensor, " samples"],
    group_size: int,
    *,
    leave_one_out: bool = False,
    normalize_std: bool = True,
    sample_mask: Shaped[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Return A_i = (r_i − b_i) / (σ + ε) over groups of samples of one prompt.

    b_i is the mean of the group, or with `leave_one_out` the mean of the *other* samples (RLOO; unbiased, because r_i
    is not part of its own baseline). σ is the sample standard deviation of the group; without `normalize_std` there is
    no division (Dr. GRPO). A group of equal rewards gets exactly 0.

    A sample whose `sample_mask` is 0 is not part of its group: it gets 0, and its reward is not read.

    Shapes: rewards, sample_mask and the result are [num_groups · group_size], with groups contiguous.
    Source: GRPO, arXiv:2402.03300 §4.1.2; RLOO, arXiv:2402.14740; Dr. GRPO, arXiv:2503.20783.

    Args:
        rewards: One reward per sample.
        group_size: The number of samples per prompt.
        leave_one_out: Whether a sample's baseline leaves out its own reward.
        normalize_std: Whether to divide by the standard deviation.
        sample_mask: 0 for samples to leave out, such as failed ones; None to keep all.

    Raises:
        ValueError: The rewards do not form whole groups.
    """

    def compare(groups: Float[Tensor, "groups size"]) -> Float[Tensor, "groups size"]:
        size = groups.shape[1]
        total = groups.sum(1, keepdim=True)
        baseline = (total - groups) / (size - 1) if leave_one_out else total / size
        centred = groups - baseline
        if normalize_std:
            centred = centred / (groups.std(1, keepdim=True) + _EPSILON)
        all_equal = (groups == groups[:, :1]).all(1, keepdim=True)
        return torch.where(all_equal, 0.0, centred)

    return _compare_groups(compare, group_size, sample_mask, rewards.float())


def _compare_groups(
    compare: Callable[..., Tensor],
    group_size: int,
    sample_mask: Shaped[Tensor, " samples"] | None,
    *values: Float[Tensor, " samples"],
) -> Float[Tensor, " samples"]:
    """Return the result of `compare` for each sample, and 0 for samples that are left out or alone in their group.

    Without the left-out samples, groups may differ in size; `compare` gets all groups of one size in one call. So its
    results are bitwise the same as if the left-out samples had never been in the batch.

    Args:
        compare: A function of values, [groups, size] each, that returns one value for each sample.
        group_size: The number of samples per prompt.
        sample_mask: 0 for samples to leave out; None to keep all.
        values: The values to pass to `compare`, [B] each.
    """
    if values[0].dim() != 1:
        raise ValueError(f"rewards {tuple(values[0].shape)} must be one reward per sample, [B]")
    check_groups(group_size, rewards=values[0], **({} if sample_mask is None else {"sample_mask": sample_mask}))
    if sample_mask is None or bool((sample_mask != 0).all()):
        return compare(*(column.view(-1, group_size) for column in values)).reshape(-1)
    kept = (sample_mask != 0).view(-1, group_size)
    sizes, result = kept.sum(1), torch.zeros_like(values[0])
    for size in sizes.unique().tolist():
        if size > 1:
            chosen = (kept & (sizes == size)[:, None]).view(-1)
            result[chosen] = compare(*(column[chosen].view(-1, size) for column in values)).reshape(-1)
    return result


def generalized_advantages(
    rewards: Float[Tensor, "batch sequence"],
    values: Float[Tensor, "batch sequence"],
    mask: Shaped[Tensor, "batch sequence"],
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Float[Tensor, "batch sequence"], Float[Tensor, "batch sequence"]]:
    """Return (A, A + V) with A_t = δ_t + γλ·A_next and δ_t = r_t + γ·V_next − V_t.

    `next` is the sequence's next token with mask ≠ 0; after the last such token, V and A are 0. A + V estimates the
    return from token t on, which the critic learns. λ = 1 gives Σ γ^k·r − V_t, λ = 0 gives δ_t.

    Shapes: rewards, values and mask are [B, S]; both results are [B, S] fp32.
    Source: Schulman et al. 2016, "High-dimensional continuous control using generalized advantage estimation"
    (arXiv:1506.02438), eq. 16.

    Args:
        rewards: r_t, the reward for token t.
        values: V_t, the critic's value of the prefix before token t.
        mask: Tokens with mask ≠ 0 count.
        discount: γ.
        gae_lambda: λ.

    Raises:
        ValueError: The shapes differ.
    """
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, values {tuple(values.shape)} and mask {tuple(mask.shape)} must have one "
            "shape [B, S]"
        )
    kept = mask != 0
    rewards, values = rewards.float(), values.float()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        surprise = rewards[:, t] + discount * next_value - values[:, t]
        next_advantage = torch.where(kept[:, t], surprise + discount * gae_lambda * next_advantage, next_advantage)
        next_value = torch.where(kept[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(kept[:, t], next_advantage, 0.0)
    return advantages, torch.where(kept, advantages + values, 0.0)


def whiten(
    advantages: Float[Tensor, "batch sequence"],
    mask: Shaped[Tensor, "batch sequence"],
    ranks: RankReduction = ALONE,
) -> Float[Tensor, "batch sequence"]:
    """Return (A − mean) / (std + ε) over all tokens of all ranks with mask ≠ 0, and exactly 0 if these A are equal.

    std is the sample standard deviation, as in `group_relative`. Collective over the ranks that share the batch.

    Shapes: advantages and mask are [B, S]; the result is [B, S] fp32. It is NaN if any A with mask ≠ 0 is.
    Source: Andrychowicz et al. 2021, "What matters for on-policy deep actor-critic methods?" (arXiv:2006.05990),
    advantage normalization.

    Raises:
        ValueError: The shapes differ.
    """
    if advantages.shape != mask.shape:
        raise ValueError(
            f"advantages {tuple(advantages.shape)} and mask {tuple(mask.shape)} must have one shape [B, S]"
        )
    kept = mask != 0
    chosen = advantages[kept].float()
    whitened = torch.zeros(advantages.shape, device=advantages.device)
    moments = ranks.moments(chosen, correction=1)
    if not moments.least >= moments.most:  # true for NaN, which then makes the result NaN
        whitened[kept] = ((chosen - moments.mean) / (moments.deviation + _WHITENING_EPSILON)).float()
    return whitened


def token_rewards(
    scores: Real[Tensor, " batch"],
    mask: Shaped[Tensor, "batch sequence"],
    kl: Float[Tensor, "batch sequence"] | None,
    kl_coefficient: float,
) -> Float[Tensor, "batch sequence"]:
    """Return r_t = −β·kl_t, plus the score of the sequence at its last token with mask ≠ 0.

    A sequence without such a token has rewards of 0.

    Shapes: scores is [B]; mask and kl are [B, S]; the result is [B, S] fp32.
    Source: Ouyang et al. 2022, "Training language models to follow instructions with human feedback"
    (arXiv:2203.02155), eq. 2.

    Args:
        scores: One reward per sequence.
        mask: Tokens with mask ≠ 0 count.
        kl: Estimates of KL(π‖π_ref) per token, in nats; None for no penalty.
        kl_coefficient: β.

    Raises:
        ValueError: The shapes do not match.
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
    rewards: Float[Tensor, "batch sequence"],
    mask: Shaped[Tensor, "batch sequence"],
    ranks: RankReduction = ALONE,
    *,
    discount: float = 1.0,
) -> Float[Tensor, "batch sequence"]:
    """Return whiten(Σ_k γ^k·r_{t+k}): the return from token t on, whitened over the whole batch, without a critic.

    Collective over the ranks that share the batch.

    Shapes: rewards and mask are [B, S]; the result is [B, S] fp32.
    Source: Hu 2025, "REINFORCE++" (arXiv:2501.03262).
    """
    no_critic = torch.zeros_like(rewards)
    returns, _ = generalized_advantages(rewards, no_critic, mask, discount=discount, gae_lambda=1.0)
    return whiten(returns, mask, ranks)


def reinforce_plus_plus_baseline(
    rewards: Real[Tensor, " samples"],
    group_size: int,
    mask: Shaped[Tensor, "samples sequence"],
    ranks: RankReduction = ALONE,
    sample_mask: Shaped[Tensor, " samples"] | None = None,
) -> Float[Tensor, "samples sequence"]:
    """Return whiten(r_i − mean of the group) over the whole batch, with sample i's difference at each of its tokens.

    Samples whose `sample_mask` is 0 are left out of their group. Collective over the ranks that share the batch.

    Shapes: rewards is [num_groups · group_size], with groups contiguous; mask is [B, S]; the result is [B, S] fp32.
    Source: Hu 2025, "REINFORCE++" (arXiv:2501.03262), REINFORCE++-baseline.
    """
    check_groups(group_size, rewards=rewards, mask=mask)
    centred = group_relative(rewards, group_size, normalize_std=False, sample_mask=sample_mask)
    return whiten(centred[:, None].expand(mask.shape), mask, ranks)


def group_decoupled(
    scores: Float[Tensor, "samples functions"],
    weights: Float[Tensor, " functions"],
    group_size: int,
    ranks: RankReduction = ALONE,
) -> Float[Tensor, " samples"]:
    """Return whiten(Σ_k w_k·(r_ik − mean_k) / (σ_k + ε)), with each function's mean and std in the group.

    A function's influence thus depends on its weight, not on the scale of its scores. NaN scores are left out, and a
    sample without scores gets 0. In a group where each function gives equal scores, all samples have 0 before the
    whitening. The whitening is over the samples of the whole batch. Collective over the ranks that share the batch.

    Shapes: scores is [num_groups · group_size, K], with groups contiguous; weights is [K]; the result is [B] fp32.
    Source: Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization" (arXiv:2601.05242).
    """
    check_groups(group_size, scores=scores)
    if weights.shape != scores.shape[1:] or not len(weights):
        raise ValueError(
            f"weights {tuple(weights.shape)} must be [K], one for each function of scores {tuple(scores.shape)}, "
            "[B, K] with K ≥ 1"
        )
    groups = scores.view(-1, group_size, scores.shape[1])
    exists = ~groups.isnan()
    count = exists.sum(1, keepdim=True)
    mean = torch.where(exists, groups, 0.0).sum(1, keepdim=True) / count.clamp(min=1)
    centred = torch.where(exists, groups - mean, 0.0)
    deviation = ((centred**2).sum(1, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
    least = torch.where(exists, groups, torch.inf).amin(1, keepdim=True)
    most = torch.where(exists, groups, -torch.inf).amax(1, keepdim=True)
    normalised = torch.where(most > least, centred / (deviation + _EPSILON), 0.0)
    counts = exists.any(2).view(-1, 1)
    return whiten((normalised * weights).sum(2).view(-1, 1), counts, ranks)[:, 0]


def optimal_baseline(
    rewards: Real[Tensor, " samples"],
    group_size: int,
    mask: Shaped[Tensor, "samples sequence"],
    sample_mask: Shaped[Tensor, " samples"] | None = None,
) -> Float[Tensor, " samples"]:
    """Return A_i = r_i − Σ_j l_j·r_j / Σ_j l_j in groups of samples of one prompt; l_j is sample j's number of tokens.

    This baseline has the least variance if a sample's squared gradient is proportional to its length. A group of equal
    rewards gets exactly 0, and so does one without tokens. Samples whose `sample_mask` is 0 are left out of their
    group.

    Shapes: rewards is [num_groups · group_size], with groups contiguous; mask is [B, S]; the result is [B] fp32.
    Source: Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline" (arXiv:2505.23585), eq. 6.
    """

    def compare(
        groups: Float[Tensor, "groups size"], lengths: Float[Tensor, "groups size"]
    ) -> Float[Tensor, "groups size"]:
        total = lengths.sum(1, keepdim=True)
        baseline = (lengths * groups).sum(1, keepdim=True) / total.clamp(min=1)
        silent = (groups == groups[:, :1]).all(1, keepdim=True) | (total == 0)
        return torch.where(silent, 0.0, groups - baseline)

    check_groups(group_size, rewards=rewards, mask=mask)
    return _compare_groups(compare, group_size, sample_mask, rewards.float(), (mask != 0).sum(1).float())


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
    k; with `leave_one_out`, b_k leaves out sample i itself. If all G_jk are equal, or only one sample has a turn k,
    advantages at turn k are exactly 0.

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
    rewards, exists = _sum_turns(token_rewards, turns, group_size)
    returns = _sum_to_end(rewards)
    count = exists.sum(1, keepdim=True)
    total = torch.where(exists, returns, 0.0).sum(1, keepdim=True)
    if leave_one_out:
        centred = returns - (total - returns) / (count - 1).clamp(min=1)
    else:
        centred = returns - total / count.clamp(min=1)
    if normalize_std:
        centred = centred / (_deviation(returns, exists, 1) + _EPSILON)
    advantages = torch.where(_all_equal(returns, exists, 1), 0.0, centred)
    return _spread_to_tokens(advantages.flatten(0, 1), turns)


def group_relative_steps(
    token_rewards: Float[Tensor, "batch sequence"],
    turns: Int[Tensor, "batch sequence"],
    group_size: int,
    *,
    normalize_std: bool = True,
) -> Float[Tensor, "batch sequence"]:
    """Return A_ik = Σ_{l ≥ k} (r_il − b) / (σ + ε), where r_il is the reward of turn l of sample i.

    b and σ are the mean and the sample standard deviation of the rewards of all turns of the group. If all rewards are
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
    rewards, exists = _sum_turns(token_rewards, turns, group_size)
    every = (1, 2)
    count = exists.sum(every, keepdim=True).clamp(min=1)
    centred = rewards - torch.where(exists, rewards, 0.0).sum(every, keepdim=True) / count
    if normalize_std:
        centred = centred / (_deviation(rewards, exists, every) + _EPSILON)
    centred = torch.where(exists & ~_all_equal(rewards, exists, every), centred, 0.0)
    return _spread_to_tokens(_sum_to_end(centred).flatten(0, 1), turns)


def _sum_turns(
    token_rewards: Float[Tensor, "batch sequence"], turns: Int[Tensor, "batch sequence"], group_size: int
) -> tuple[Float[Tensor, "groups size turns"], Bool[Tensor, "groups size turns"]]:
    """Return the reward of each turn, and whether the turn exists."""
    check_groups(group_size, token_rewards=token_rewards, turns=turns)
    if token_rewards.shape != turns.shape:
        raise ValueError(
            f"token_rewards {tuple(token_rewards.shape)} and turns {tuple(turns.shape)} must have one shape [B, S]"
        )
    most = max(int(turns.max()) + 1, 1) if turns.numel() else 1
    sampled = turns >= 0
    index = turns.clamp(min=0)
    rewards = torch.zeros(turns.shape[0], most).scatter_add_(1, index, torch.where(sampled, token_rewards.float(), 0.0))
    exists = torch.zeros(turns.shape[0], most).scatter_add_(1, index, sampled.float()) > 0
    shape = (-1, group_size, most)
    return rewards.view(shape), exists.view(shape)


def _sum_to_end(values: Tensor) -> Tensor:
    """Return the sum of each entry and all entries after it in the last dimension."""
    return values.flip(-1).cumsum(-1).flip(-1)


def _deviation(values: Tensor, exists: Tensor, over: int | tuple[int, ...]) -> Tensor:
    """Return the sample standard deviation of the values that exist, or 0 for fewer than two."""
    count = exists.sum(over, keepdim=True)
    mean = torch.where(exists, values, 0.0).sum(over, keepdim=True) / count.clamp(min=1)
    squares = torch.where(exists, (values - mean) ** 2, 0.0).sum(over, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def _all_equal(values: Tensor, exists: Tensor, over: int | tuple[int, ...]) -> Tensor:
    """Return whether all values that exist are equal."""
    highest = torch.where(exists, values, -torch.inf).amax(over, keepdim=True)
    lowest = torch.where(exists, values, torch.inf).amin(over, keepdim=True)
    return highest <= lowest


def _spread_to_tokens(
    values: Float[Tensor, "batch turns"], turns: Int[Tensor, "batch sequence"]
) -> Float[Tensor, "batch sequence"]:
    """Return the value of the token's turn at sampled tokens, and 0 at other tokens."""
    return torch.where(turns >= 0, values.gather(1, turns.clamp(min=0)), 0.0)

"""Metrics of rollouts: the distributions of rewards, lengths, advantages, ages and mismatches.

Metrics of samples are computed from numbers that every rank has for every sequence. Metrics of tokens are reduced over
the ranks that have the tokens. Both are exact over all rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Real, Shaped
from torch import Tensor

from rl_megatron.batching.batch import SAMPLED, Batch
from rl_megatron.batching.config import check_groups
from rl_megatron.topology.reductions import ALONE, Moments, RankReduction

QUANTILES = (0.1, 0.5, 0.9)


def sample_mask(numbers: Mapping[str, Tensor]) -> Tensor:
    """Return 1 for each sequence, or 0 if its sample failed, [B] fp32."""
    rewards = numbers["rewards"]
    return numbers["sample_mask"].float() if "sample_mask" in numbers else torch.ones(len(rewards))


def informative_groups(
    rewards: Real[Tensor, " samples"], group_size: int, sample_mask: Shaped[Tensor, " samples"] | None = None
) -> Bool[Tensor, " samples//{group_size}"]:
    """Return which groups have rewards that differ; DAPO's dynamic sampling drops the others, which have no gradient.

    Samples whose `sample_mask` is 0 are not compared.

    Shapes: rewards and sample_mask are [num_groups · group_size]; the result is [num_groups].
    """
    check_groups(group_size, rewards=rewards, **({} if sample_mask is None else {"sample_mask": sample_mask}))
    groups = rewards.float().view(-1, group_size)
    if sample_mask is None:
        return (groups != groups[:, :1]).any(1)
    kept = (sample_mask != 0).view(-1, group_size)
    least, most = torch.where(kept, groups, torch.inf).amin(1), torch.where(kept, groups, -torch.inf).amax(1)
    return most > least


def describe_rollouts(parts: Sequence[Batch], group_size: int) -> dict[str, float]:
    """Return metrics of rollouts: how rewards and completion lengths are distributed, and two shares.

    `stopped` is the share of completions that ended with a stop token. `informative_groups` is the share of groups
    whose rewards differ; it is 0 if groups have one sample.

    Args:
        parts: The rollouts, each with whole groups.
        group_size: The number of samples per prompt.
    """
    columns = zip(*(_describe_trajectories(part) for part in parts), strict=True)
    rewards, has_ended, lengths, stopped = (torch.cat(values) for values in columns)
    groups = informative_groups(rewards, group_size, has_ended).float().mean().item()
    rewards, lengths, stopped = (values[has_ended] for values in (rewards, lengths, stopped))  # the others failed
    return {
        "reward": rewards.mean().item(),
        **describe_distribution("reward", rewards, ALONE.moments(rewards), ALONE),
        "completion_tokens": lengths.mean().item(),
        **describe_distribution("completion_tokens", lengths, ALONE.moments(lengths), ALONE),
        "stopped": stopped.mean().item(),
        "informative_groups": groups,
    }


def _describe_trajectories(rollouts: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the reward of each trajectory, whether it has not failed, its sampled tokens, and whether it stopped."""
    numbers, index = rollouts.facts, rollouts.trajectories
    return (
        index.take_first(numbers["rewards"]), index.take_first(numbers["sample_mask"]) > 0,
        index.total(numbers[SAMPLED]).float(), index.take_last(numbers["stopped"]).float(),
    )  # fmt: skip


def learned_statistics(rollouts: Batch, weight_version: int) -> dict[str, float]:
    """Return metrics of the rollouts that a step learns from: their advantages, if any, and the weights' ages.

    Collective over the ranks that share the rollouts.

    Args:
        rollouts: The rollouts, with `advantages` [B, S] or [B] if the loss reads them.
        weight_version: The version of the policy's weights.
    """
    ranks, metrics = rollouts.ranks, {}
    if "advantages" in rollouts:
        advantages = rollouts["advantages"]
        if advantages.dim() == 2:
            advantages = advantages[rollouts["token_mask"].bool()]
        moments = ranks.moments(advantages)
        metrics = {"advantage_mean": moments.mean, **describe_distribution("advantage", advantages, moments, ranks)}
    versions = rollouts["weight_version"]
    ages = weight_version - versions[versions >= 0]  # a failed trajectory has no version
    moments = ranks.moments(ages)
    return metrics | {"weight_age_mean": moments.mean, "weight_age_max": moments.most}


def correction_statistics(report: Mapping[str, float]) -> dict[str, float]:
    """Return `correction_ess`, the effective sample size of the correction's weights as a share of the tokens.

    Tokens with weights w are worth (Σw)²/Σw² tokens with equal weights (Kish 1965). The result is empty if the loss has
    no weights.

    Args:
        report: The metrics of a training step.
    """
    mean, square = (report.get(f"sampling_importance_ratio{end}") for end in ("", "_square"))
    return {} if mean is None or not square else {"correction_ess": mean**2 / square}


def describe_distribution(name: str, values: Tensor, moments: Moments, ranks: RankReduction) -> dict[str, float]:
    """Return the standard deviation, extremes and quantiles of all ranks' values; empty if there are no values.

    Args:
        name: The name of the values.
        values: [n] This rank's values.
        moments: All ranks' moments.
        ranks: The ranks that share the values.
    """
    if not moments.number:
        return {}
    quantiles = ranks.order_statistics(values, [round(share * (moments.number - 1)) for share in QUANTILES])
    return {
        f"{name}_std": moments.deviation,
        f"{name}_min": moments.least,
        **{f"{name}_p{share * 100:.0f}": value for share, value in zip(QUANTILES, quantiles, strict=True)},
        f"{name}_max": moments.most,
    }


def logprob_mismatch(rollouts: Batch) -> dict[str, float]:
    """Return the mean, 99th percentile and maximum of |trainer's − engine's logprob| over sampled tokens, in nats.

    They are 0 up to rounding if the engine and the trainer have the same weights. The result is empty if the trainer's
    logprobs were not recomputed: the loss then reports the mean and the maximum (`losses/mismatch.py`). Collective.
    """
    if "prev_logprobs" not in rollouts:
        return {}
    ranks, sampled = rollouts.ranks, rollouts["token_mask"].bool()
    difference = (rollouts["prev_logprobs"] - rollouts["generation_logprobs"]).abs()[sampled]
    moments = ranks.moments(difference)
    if not moments.number:
        return {"mismatch_mean": 0.0, "mismatch_p99": 0.0, "mismatch_max": 0.0}
    (high,) = ranks.order_statistics(difference, [-(-99 * (moments.number - 1) // 100)])
    return {"mismatch_mean": moments.mean, "mismatch_p99": high, "mismatch_max": moments.most}


def mean_over_tokens(values: Tensor, rollouts: Batch) -> float:
    """Return the mean of values [n, S] over all ranks' sampled tokens; 0 if there are none. Collective."""
    mask = rollouts["token_mask"].double()
    local_sums = torch.stack([torch.where(mask != 0, values.double() * mask, 0.0).sum(), mask.sum()])
    total, count = rollouts.ranks.sum(local_sums)
    return (total / count).item() if count > 0 else 0.0

"""Metrics of rollouts: how rewards, lengths, advantages, ages and mismatches are distributed."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rl_megatron.algorithms.advantages import informative_groups
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.rollouts.trajectory_index import TrajectoryIndex

QUANTILES = (0.1, 0.5, 0.9)


def statistics(rollouts: BatchedDataDict, group_size: int) -> dict[str, float]:
    """Return metrics of the rollouts: how rewards and completion lengths are distributed, and two shares.

    `stopped` is the share of completions that ended with a stop token. `informative_groups` is the share of groups
    whose rewards differ; it is 0 if a group is one sample.
    """
    index = TrajectoryIndex(rollouts)
    rewards, has_ended = index.of_first(rollouts["rewards"]), index.of_first(rollouts["sample_mask"]) > 0
    lengths, stopped = index.total(rollouts["token_mask"].sum(1)), index.of_last(rollouts["stopped"]).float()
    groups = informative_groups(rewards, group_size).float().mean().item()
    rewards, lengths, stopped = (values[has_ended] for values in (rewards, lengths, stopped))  # others have failed
    return {
        "reward": rewards.mean().item(),
        **_distribution("reward", rewards),
        "completion_tokens": lengths.mean().item(),
        **_distribution("completion_tokens", lengths),
        "stopped": stopped.mean().item(),
        "informative_groups": groups,
    }


def learned_statistics(rollouts: BatchedDataDict, weight_version: int) -> dict[str, float]:
    """Return metrics of the rollouts that a step learns from: their advantages, and the age of their weights.

    Args:
        rollouts: The rollouts, with `advantages` [B, S] or [B].
        weight_version: The version of the policy's weights.
    """
    advantages = rollouts["advantages"]
    if advantages.dim() == 2:
        advantages = advantages[rollouts["token_mask"].bool()]
    ages = weight_version - rollouts["weight_version"]
    return {
        "advantage_mean": advantages.float().mean().item() if advantages.numel() else 0.0,
        **_distribution("advantage", advantages),
        "weight_age_mean": ages.float().mean().item(),
        "weight_age_max": float(ages.max()),
    }


def correction_statistics(report: Mapping[str, float]) -> dict[str, float]:
    """Return `correction_ess`, the effective sample size of the correction's weights as a share of the tokens.

    Weights w of n tokens are worth (Σw)²/Σw² equal ones (Kish 1965). The result is empty if the loss has no weights.

    Args:
        report: The metrics of a training step.
    """
    mean, square = (report.get(f"sampling_importance_ratio{end}") for end in ("", "_square"))
    return {} if mean is None or not square else {"correction_ess": mean**2 / square}


def _distribution(name: str, values: Tensor) -> dict[str, float]:
    """Return the standard deviation, the extremes and some quantiles of values."""
    if not values.numel():
        return {}
    values = values.float()
    found = {f"{name}_std": values.std(correction=0).item(), f"{name}_min": values.min().item()}
    ordered = values.sort().values  # torch.quantile takes no more than 16 million values
    for share in QUANTILES:
        found[f"{name}_p{share * 100:.0f}"] = ordered[round(share * (len(ordered) - 1))].item()
    return found | {f"{name}_max": values.max().item()}


def logprob_mismatch(rollouts: BatchedDataDict) -> dict[str, float]:
    """Return the mean, 99th percentile and maximum of |trainer's − engine's logprob| over sampled tokens, in nats.

    They are 0 up to rounding if the engine and the trainer have the same weights. The result is empty if the trainer's
    were not recomputed: the loss then reports the mean and the maximum (`losses/mismatch.py`).
    """
    if "prev_logprobs" not in rollouts:
        return {}
    sampled = rollouts["token_mask"].bool()
    difference = (rollouts["prev_logprobs"] - rollouts["generation_logprobs"]).abs()[sampled]
    if not difference.numel():
        return {"mismatch_mean": 0.0, "mismatch_p99": 0.0, "mismatch_max": 0.0}
    ordered = difference.sort().values
    return {
        "mismatch_mean": difference.mean().item(),
        "mismatch_p99": ordered[-(-99 * (len(ordered) - 1) // 100)].item(),
        "mismatch_max": ordered[-1].item(),
    }

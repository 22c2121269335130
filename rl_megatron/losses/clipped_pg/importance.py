"""Importance weights that correct for the generation engine's probabilities, and metrics of the difference to them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.losses import functional as F
from rl_megatron.losses.clipped_pg.means import Means
from rl_megatron.losses.mismatch import mismatch_metrics


def importance_weights(
    cfg: ClippedPGLossConfig,
    prev_logprobs: Float[Tensor, "batch tokens"],
    generation_logprobs: Float[Tensor, "batch tokens"],
    token_mask: Float[Tensor, "batch tokens"],
    infinite_is_outside: bool = True,
) -> tuple[Float[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
    """Return (π_prev/π_generation after truncation, whether it was outside its bounds) for every token.

    Under GSPO the weight is per sequence: the product over the sequence's tokens. A NaN or infinite weight becomes 0.

    Shapes: all tensor arguments and both results are [B, S-1]. `token_mask` does not include the sample's weight.

    Args:
        cfg: The loss's settings.
        prev_logprobs: log π_prev.
        generation_logprobs: log π_generation.
        token_mask: The tokens that count.
        infinite_is_outside: Whether a weight that is NaN or infinite is outside every bound. If not, it is truncated
            as a weight of 0, and counts as 1 in the mean of a sequence, as in NeMo RL.
    """
    log_ratio = prev_logprobs - generation_logprobs
    log_weight = log_ratio
    if cfg.sequence_level_importance_ratios:
        log_weight = F.masked_sum(log_ratio, token_mask, dim=-1)[:, None].expand_as(log_ratio)
    weights = F.importance_weight(log_weight)
    high, low = cfg.truncated_importance_sampling_ratio, cfg.truncated_importance_sampling_ratio_min or 0.0
    if cfg.truncation_type is None or high is None:
        return weights, torch.zeros_like(weights, dtype=torch.bool)
    if not infinite_is_outside:
        log_ratio = torch.nan_to_num(log_ratio, nan=0.0, posinf=0.0, neginf=0.0)
    if cfg.truncation_type == "tis":
        truncated, outside = F.truncated_weights(weights, low, high)
    elif cfg.truncation_type == "icepop":
        truncated, outside = F.icepop_weights(weights, low, high)
    else:
        truncated, outside = F.sequence_masked_weights(weights, log_ratio, token_mask, low, high)
    if not infinite_is_outside:
        return truncated, outside
    infinite = ~torch.isfinite(log_weight.exp())
    return torch.where(infinite, 0.0, truncated), outside | infinite


def rejected(
    cfg: ClippedPGLossConfig,
    prev_logprobs: Float[Tensor, "batch tokens"],
    generation_logprobs: Float[Tensor, "batch tokens"],
    token_mask: Float[Tensor, "batch tokens"],
) -> Bool[Tensor, "batch tokens"]:
    """Return, at every token, whether its sequence is rejected, as sequence_rejection_type says.

    A token veto is not considered; see `vetoed`.

    Shapes: all tensor arguments and the result are [B, S-1]. `token_mask` does not include the sample's weight.

    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch"; the k3 estimate is `functional.kl_penalty`'s.
    """
    log_ratio, high = (prev_logprobs - generation_logprobs).detach(), cfg.sequence_rejection_max
    if cfg.sequence_rejection_type is None:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    assert high is not None  # the settings check it
    if cfg.sequence_rejection_type == "k3":
        return F.mean_k3_above(log_ratio, token_mask, high)
    return F.geometric_mean_outside(log_ratio, token_mask, cfg.sequence_rejection_min or 0.0, high)


def vetoed(
    cfg: ClippedPGLossConfig,
    prev_logprobs: Float[Tensor, "batch tokens"],
    generation_logprobs: Float[Tensor, "batch tokens"],
    token_mask: Float[Tensor, "batch tokens"],
) -> Bool[Tensor, "batch tokens"]:
    """Return, at every token, whether a token of its sequence has a ratio below token_veto_threshold.

    Shapes: all tensor arguments and the result are [B, S-1]. `token_mask` does not include the sample's weight.
    """
    log_ratio = (prev_logprobs - generation_logprobs).detach()
    if cfg.token_veto_threshold is None:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    return F.any_token_below(log_ratio, token_mask, cfg.token_veto_threshold)


def generation_metrics(
    cfg: ClippedPGLossConfig,
    logprobs: Float[Tensor, "batch tokens"],
    prev_logprobs: Float[Tensor, "batch tokens"],
    generation_logprobs: Float[Tensor, "batch tokens"],
    weights: Float[Tensor, "batch tokens"],
    outside: Bool[Tensor, "batch tokens"],
    means: Means,
) -> dict[str, Float[Tensor, ""]]:
    """Return metrics of the difference between π_prev and π_generation, and of the correction's weights.

    Shapes: all tensor arguments are [B, S-1]; results are scalars.

    Args:
        cfg: The loss's settings.
        logprobs: log π.
        prev_logprobs: log π_prev.
        generation_logprobs: log π_generation.
        weights: The weights of `importance_weights`.
        outside: Which weights were outside their bounds, from `importance_weights`.
        means: The averages over the global batch.
    """
    generation_logprobs = torch.where(generation_logprobs.isnan(), -torch.inf, generation_logprobs)
    metrics = mismatch_metrics(
        prev_logprobs, generation_logprobs, means.streams.mask, means.over_tokens, cfg.reference_policy_kl_type
    )
    weight_mean = means.over_sequences if cfg.sequence_level_importance_ratios else means.over_tokens
    metrics["sampling_importance_ratio"] = weight_mean(weights)
    bounded = weights.clamp(max=math.exp(F.MAX_LOG_RATIO))  # so that a square is finite
    metrics["sampling_importance_ratio_square"] = weight_mean(bounded.square())
    metrics["approx_entropy"] = -means.over_tokens(F.bounded_exp(logprobs - generation_logprobs) * logprobs)
    if cfg.truncation_type is not None:
        outside_mean = means.over_sequences if cfg.truncation_type == "seq-mask-tis" else means.over_tokens
        metrics["is_oob_ratio"] = outside_mean(outside.to(weights))
    return metrics

"""The ratio of the policy's probabilities to the probabilities before the update, and its metrics."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.losses import functional as F
from rl_megatron.losses.clipped_pg.means import Means


def policy_ratio(
    cfg: ClippedPGLossConfig,
    logprobs: Float[Tensor, "batch tokens"],
    prev_logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
) -> tuple[Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]]:
    """Return (ratio π/π_prev, clipped ratio) of every token.

    With disable_ppo_ratio both are the logprobs themselves, and prev_logprobs is not read.

    Shapes: logprobs, prev_logprobs, mask and both results are [B, S-1].
    """
    if cfg.force_on_policy_ratio:
        ratio = F.score_function_weight(logprobs)
        return ratio, ratio
    if cfg.disable_ppo_ratio:
        return logprobs, logprobs
    log_ratio = logprobs - prev_logprobs
    if cfg.sequence_level_importance_ratios:
        log_ratio = F.sequence_log_ratio(log_ratio, mask)
    if cfg.use_gmpo:  # its clip range is one of logarithms
        return F.bounded_exp(log_ratio), F.bounded_exp(log_ratio.clamp(-cfg.ratio_clip_min, cfg.ratio_clip_max))
    ratio = F.bounded_exp(log_ratio)
    return ratio, F.clip_ratio(ratio, below=cfg.ratio_clip_min, above=cfg.ratio_clip_max)


def ratio_metrics(
    ratio: Float[Tensor, "batch tokens"], clipped: Float[Tensor, "batch tokens"], means: Means
) -> dict[str, Float[Tensor, ""]]:
    """Return the share of clipped tokens, and the mean, minimum and maximum of the ratio and of the clipped ratio."""
    mask = means.streams.mask
    metrics = {"clip_fraction": means.over_tokens((ratio != clipped).to(ratio))}
    for name, values in {"probs_ratio": ratio, "probs_ratio_clamped": clipped}.items():
        metrics[name] = means.over_tokens(values)
        metrics[f"{name}_min"], metrics[f"{name}_max"] = F.masked_min(values, mask), F.masked_max(values, mask)
    return metrics

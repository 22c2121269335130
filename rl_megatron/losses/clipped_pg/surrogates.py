"""The surrogate objectives: the per-token loss from a ratio and an advantage."""

from __future__ import annotations

from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.losses import functional as F


def surrogate_loss(
    cfg: ClippedPGLossConfig,
    advantages: Float[Tensor, "batch tokens"],
    ratio: Float[Tensor, "batch tokens"],
    clipped_ratio: Float[Tensor, "batch tokens"],
    logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    selected: Float[Tensor, "batch tokens"] | None = None,
) -> Float[Tensor, "batch tokens"]:
    """Return the loss of every token: PPO's, with dual clip if ratio_clip_c is set, or that of another method.

    Shapes: all tensor arguments and the result are [B, S-1].

    Args:
        cfg: The loss's settings.
        advantages: A.
        ratio: π/π_prev.
        clipped_ratio: The clipped ratio.
        logprobs: log π.
        mask: The mask of the tokens that count.
        selected: 1 at the tokens that were selected by their covariance, otherwise 0; only for Clip-Cov and KL-Cov.
    """
    if cfg.use_cispo:
        return F.cispo_surrogate(advantages, clipped_ratio, logprobs)
    if cfg.use_gmpo:
        return F.geometric_mean_surrogate(advantages, ratio, clipped_ratio, mask)
    if cfg.use_sapo:
        return F.soft_surrogate(advantages, ratio, cfg.sapo_temperature_pos, cfg.sapo_temperature_neg)
    if cfg.use_kl_cov and selected is not None:
        return F.penalised_surrogate(advantages, ratio, cfg.kl_cov_coef * selected)
    loss = F.clipped_surrogate(advantages, ratio, clipped_ratio)
    loss = loss if cfg.ratio_clip_c is None else F.dual_clip(loss, advantages, cfg.ratio_clip_c)
    return loss if selected is None else loss * (1 - selected)

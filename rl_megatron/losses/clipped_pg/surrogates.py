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
) -> Float[Tensor, "batch tokens"]:
    """Return the loss of every token: PPO's, with dual clip if ratio_clip_c is set, or CISPO's, GMPO's or SAPO's.

    Shapes: all tensor arguments and the result are [B, S-1].
    """
    if cfg.use_cispo:
        return F.cispo_surrogate(advantages, clipped_ratio, logprobs)
    if cfg.use_gmpo:
        return F.geometric_mean_surrogate(advantages, ratio, clipped_ratio, mask)
    if cfg.use_sapo:
        return F.soft_surrogate(advantages, ratio, cfg.sapo_temperature_pos, cfg.sapo_temperature_neg)
    loss = F.clipped_surrogate(advantages, ratio, clipped_ratio)
    return loss if cfg.ratio_clip_c is None else F.dual_clip(loss, advantages, cfg.ratio_clip_c)

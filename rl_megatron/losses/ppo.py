"""PPO's loss of policy and critic together, as a module on tensors, with torchtune's interface."""

from __future__ import annotations

import math
from functools import reduce

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.losses import functional as F


class PPOLoss(torch.nn.Module):
    """L = L_π + value_coeff·L_V, each a mean over the tokens given (this call's, not a global batch's):

        L_π = mean( −min( r·A, clip(r, 1 ± epsilon)·A ) ),  r = π/π_old
        L_V = ½·mean( max( (v − R)², (clip(v, v_old ± value_clip_range) − R)² ) )

    epsilon: ≥ 0, how far the ratio may be from 1.
    value_clip_range: ≥ 0, how far a value may move from the rollout's.
    value_coeff: ≥ 0, the weight of the critic's loss.

    Arguments and results are torchtune's. Different: what a mask leaves out is not read, and means of nothing are 0;
    the mean of the ratios is over the mask too (torchtune's is over everything); log-ratios saturate at ±20
    (`functional.MAX_LOG_RATIO`); results are in fp32 or more.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7 and 9; the clip of values: OpenAI baselines, ppo2/model.py.
    """

    def __init__(self, epsilon: float = 0.1, value_clip_range: float = 0.2, value_coeff: float = 0.1) -> None:
        super().__init__()
        for name, value in {
            "epsilon": epsilon,
            "value_clip_range": value_clip_range,
            "value_coeff": value_coeff,
        }.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"PPOLoss: {name}={value!r} must be a number")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"PPOLoss: {name}={value} must be finite and not negative")
        self.epsilon, self.value_clip_range, self.value_coeff = epsilon, value_clip_range, value_coeff

    def forward(
        self,
        pi_old_logprobs: Shaped[Tensor, "*shape"],
        pi_logprobs: Shaped[Tensor, "*shape"],
        advantages: Shaped[Tensor, "*shape"],
        phi_old_values: Shaped[Tensor, "*value_shape"],
        phi_values: Shaped[Tensor, "*value_shape"],
        returns: Shaped[Tensor, "*value_shape"],
        padding_masks: Shaped[Tensor, "*shape"] | None = None,
        value_padding_masks: Shaped[Tensor, "*value_shape"] | None = None,
    ) -> tuple[
        Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]
    ]:
        """(loss, policy loss, value loss, mean ratio, share of tokens whose clipped loss is the larger); all but the
        loss without a gradient.

        Shapes: the first three and padding_masks of one shape; the next three and value_padding_masks of one shape.
        Args: padding_masks, value_padding_masks: True where a token counts; None where all do.
        Raises: ValueError naming shapes that differ.
        """
        mask, (old_logprobs, logprobs, advantages) = _read(
            padding_masks, pi_old_logprobs=pi_old_logprobs, pi_logprobs=pi_logprobs, advantages=advantages
        )
        ratio = F.bounded_exp(logprobs - old_logprobs)
        clipped_ratio = F.clip_ratio(ratio, self.epsilon, self.epsilon)
        policy_loss = F.masked_mean(F.clipped_surrogate(advantages, ratio, clipped_ratio), mask)
        clipped = -advantages * clipped_ratio > -advantages * ratio

        value_mask, (old_values, values, returns) = _read(
            value_padding_masks, phi_old_values=phi_old_values, phi_values=phi_values, returns=returns
        )
        error, _ = F.clipped_squared_error(values, old_values, returns, self.value_clip_range)
        value_loss = F.masked_mean(error, value_mask)

        loss = policy_loss + self.value_coeff * value_loss
        mean_ratio, clip_fraction = F.masked_mean(ratio, mask), F.masked_mean(clipped.to(ratio), mask)
        return loss, policy_loss.detach(), value_loss.detach(), mean_ratio.detach(), clip_fraction.detach()


def _read(mask: Tensor | None, **streams: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(mask as weights, streams in fp32 or more with masked positions 0)."""
    shapes = {name: tuple(stream.shape) for name, stream in streams.items()}
    if mask is not None:
        shapes["their mask"] = tuple(mask.shape)
    if len(set(shapes.values())) > 1:
        raise ValueError(f"PPOLoss: {', '.join(f'{name} {shape}' for name, shape in shapes.items())} differ in shape")
    first = next(iter(streams.values()))
    keep = torch.ones_like(first, dtype=torch.bool) if mask is None else mask != 0
    dtype = reduce(torch.promote_types, (stream.dtype for stream in streams.values()), torch.float32)
    return keep.to(dtype), [torch.where(keep, stream.to(dtype), 0.0) for stream in streams.values()]

"""PPO's loss of policy and critic as one torch module, with torchtune's interface."""

from __future__ import annotations

import math
from functools import reduce

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.losses import functional as F


class PPOLoss(torch.nn.Module):
    """PPO's loss, L = L_π + value_coeff·L_V. Each term is a mean over the tokens of this call, not of a global batch.

        L_π = mean( −min( r·A, clip(r, 1 ± epsilon)·A ) ),  r = π/π_old
        L_V = ½·mean( max( (v − R)², (clip(v, v_old ± value_clip_range) − R)² ) )

    Arguments and results are torchtune's. The differences from torchtune are:

    - Masked positions are not read, and the mean over no tokens is 0.
    - The mean ratio is over the unmasked tokens. In torchtune and in `compat.torchtune.PPOLoss` it is over all tokens.
    - Log-ratios saturate at ±20 (`functional.MAX_LOG_RATIO`).
    - Results are in fp32 or fp64.

    Args:
        epsilon: ≥ 0. The ratio is clipped to 1 ± epsilon.
        value_clip_range: ≥ 0. A value is clipped to the rollout's value ± this range.
        value_coeff: ≥ 0. The weight of the critic's loss.

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
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
        """Return (loss, policy loss, value loss, mean ratio, clip fraction). Only the loss has a gradient.

        The clip fraction is the share of tokens whose clipped loss is larger than their unclipped loss.

        Shapes: the policy's three tensors and padding_masks have the same shape. So do the critic's three tensors and
        value_padding_masks.

        Args:
            pi_old_logprobs: log π_old of the sampled tokens.
            pi_logprobs: log π of the same tokens.
            advantages: The advantages A.
            phi_old_values: The rollout's values v_old.
            phi_values: The critic's values v.
            returns: The returns R.
            padding_masks: True for each token that counts; None if all tokens count.
            value_padding_masks: True for each value that counts; None if all values count.

        Raises:
            ValueError: Shapes differ. The message names them.
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
    """Return (mask as weights, streams in fp32 or fp64 with masked positions set to 0)."""
    shapes = {name: tuple(stream.shape) for name, stream in streams.items()}
    if mask is not None:
        shapes["their mask"] = tuple(mask.shape)
    if len(set(shapes.values())) > 1:
        raise ValueError(f"PPOLoss: {', '.join(f'{name} {shape}' for name, shape in shapes.items())} differ in shape")
    first = next(iter(streams.values()))
    keep = torch.ones_like(first, dtype=torch.bool) if mask is None else mask != 0
    dtype = reduce(torch.promote_types, (stream.dtype for stream in streams.values()), torch.float32)
    return keep.to(dtype), [torch.where(keep, stream.to(dtype), 0.0) for stream in streams.values()]

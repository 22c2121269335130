"""torchtune's PPO loss, including its reported mean ratio: `from rl_megatron.compat.torchtune import PPOLoss`."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron import losses

Scalar = Float[Tensor, ""]


class PPOLoss(losses.PPOLoss):
    """`rl_megatron.losses.PPOLoss` whose fourth result is torchtune's mean ratio.

    This mean is over all tokens, also masked ones, and its log-ratios are not clamped. The loss is the same.
    """

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
    ) -> tuple[Scalar, Scalar, Scalar, Scalar, Scalar]:
        """Return (loss, policy loss, value loss, mean ratio of all tokens, clip fraction)."""
        loss, policy_loss, value_loss, mean_ratio, clip_fraction = super().forward(
            pi_old_logprobs, pi_logprobs, advantages, phi_old_values, phi_values, returns, padding_masks,
            value_padding_masks,
        )  # fmt: skip
        with torch.no_grad():
            ratios = (pi_logprobs.to(mean_ratio) - pi_old_logprobs.to(mean_ratio)).exp()
        return loss, policy_loss, value_loss, ratios.mean(), clip_fraction

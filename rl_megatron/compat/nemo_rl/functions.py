"""Functions of this package under NeMo RL's names."""

from __future__ import annotations

from torch import Tensor

from rl_megatron.losses.functional import kl_penalty


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: str = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: Tensor | None = None,
) -> Tensor:
    """Return `rl_megatron.losses.kl_penalty`, with NeMo RL's argument names."""
    return kl_penalty(
        logprobs, logprobs_reference, kl_type, input_clamp_value, output_clamp_value, importance_sampling_weights
    )


def calculate_kl_penalty_joschu2020(logprobs_policy: Tensor, logprobs_reference: Tensor) -> Tensor:
    """Return the k3 estimate of the KL, without clamps."""
    return kl_penalty(logprobs_policy, logprobs_reference, "k3", input_clamp=None, output_clamp=None)

"""Metrics of the difference between the trainer's and the generation engine's probabilities of sampled tokens."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.losses.functional import MAX_LOG_RATIO, bounded_exp, js_divergence, kl_penalty, masked_max

MISMATCH_MEANS = (
    "token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error", "mismatch_mean",
)  # fmt: skip
MISMATCH_MAXIMA = ("mismatch_max",)


def mismatch_metrics(
    prev_logprobs: Float[Tensor, "batch tokens"],
    generation_logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    token_mean: Callable[[Tensor], Tensor],
    kl_kind: str,
) -> dict[str, Float[Tensor, ""]]:
    """Return the `MISMATCH_MEANS` and `MISMATCH_MAXIMA` of the sampled tokens.

    token_mult_prob_error = mean e^{|log π_generation − log π_prev|} is 1 if the two probabilities agree. All other
    metrics are then 0: gen_kl_error = KL(generation‖prev), policy_kl_error = KL(prev‖generation), js_divergence_error,
    mismatch_mean = mean |log π_generation − log π_prev|, and mismatch_max, the maximum over the same differences.

    Differences above 20 nats are reported as 20, so that one token cannot make a metric infinite. mismatch_mean and
    mismatch_max have no such bound.

    Shapes: prev_logprobs, generation_logprobs and mask are [B, T]; each result is a scalar.

    Args:
        prev_logprobs: log π_prev, computed by the trainer.
        generation_logprobs: log π_generation, reported by the engine.
        mask: The mask of the tokens that count.
        token_mean: The mean over the tokens that count.
        kl_kind: The KL estimator: "k1", "k2" or "k3".
    """
    prev, generation = prev_logprobs, generation_logprobs
    difference = (generation - prev).abs()
    return {
        "token_mult_prob_error": token_mean(bounded_exp(difference)),
        "gen_kl_error": token_mean(kl_penalty(generation, prev, kl_kind, MAX_LOG_RATIO, output_clamp=None)),
        "policy_kl_error": token_mean(kl_penalty(prev, generation, kl_kind, MAX_LOG_RATIO, output_clamp=None)),
        "js_divergence_error": token_mean(js_divergence(prev, generation)),
        "mismatch_mean": token_mean(difference),
        "mismatch_max": masked_max(difference, mask),
    }

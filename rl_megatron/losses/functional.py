"""The formulas of losses as pure functions of tensors. `m` is the mask; masked positions never have an effect.

Arguments and results are [B, T], T = S−1, unless a docstring says otherwise. Log-probabilities are in nats.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor
from torch.nn.functional import logsigmoid

# Importance ratios saturate at e^±20, with gradient 0 beyond. A larger difference carries no more information, and e^90
# would overflow fp32, so that the gradient of the clipped loss would be 0 · ∞ = NaN.
MAX_LOG_RATIO = 20.0

# This bound keeps k3's exponential finite in fp32 if the input clamp is off. If the exponential overflowed, the
# gradient of the output clamp would be 0 · ∞ = NaN.
_LARGEST_EXPONENT = 80.0

# The logprobs of two forward passes of one policy differ by less than this in fp32.
_ROUNDING = 1e-4

# The upper bound of logprobs in `log_odds`, because a probability of 1 has infinite odds.
_LARGEST_LOGPROB = -1e-6


def masked_sum(
    values: Float[Tensor, "*shape"],
    mask: Shaped[Tensor, "*shape"],
    dim: int | None = None,
) -> Float[Tensor, " ..."]:
    """Return Σ m·v over the positions where m ≠ 0.

    Other positions are not read, so that a NaN there has no effect on the value or the gradient.

    Raises:
        ValueError: The shapes differ.
    """
    if values.shape != mask.shape:
        raise ValueError(f"values {tuple(values.shape)} and mask {tuple(mask.shape)} must have the same shape")
    kept = torch.where(mask != 0, values, 0.0) * mask
    return kept.sum() if dim is None else kept.sum(dim=dim)


def masked_mean(
    values: Float[Tensor, "*shape"],
    mask: Shaped[Tensor, "*shape"],
    dim: int | None = None,
    global_normalization_factor: Shaped[Tensor, ""] | float | int | None = None,
) -> Float[Tensor, " ..."]:
    """Return Σ m·v / N, or exactly 0 if N is 0.

    N is global_normalization_factor, or Σ m (over `dim`) if that is None. With a global N, the results of the parts of
    a batch add up to the batch's mean.

    Shapes: values and mask have the same shape; N is a scalar. Returns a scalar if `dim` is None, and otherwise one
    mean per entry of the other dimensions.

    Raises:
        ValueError: The shapes differ, or N is a number that is negative, NaN or infinite.
    """
    total = masked_sum(values, mask, dim)
    if global_normalization_factor is None:
        count = mask.sum() if dim is None else mask.sum(dim=dim)
    else:
        factor = global_normalization_factor
        if not isinstance(factor, Tensor) and not (math.isfinite(factor) and factor >= 0):
            raise ValueError(f"global_normalization_factor={factor} must be a count: finite and not negative")
        count = torch.as_tensor(factor, dtype=total.dtype)  # the default dtype could be narrower
    count = count.to(total)
    # An epsilon in the denominator would change the means with N ≠ 0. A count that is NaN makes the mean NaN.
    return torch.where(count == 0, 0.0, total / torch.where(count == 0, 1.0, count))


def sequence_mean(
    values: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    sample_mask: Shaped[Tensor, " batch"],
    global_valid_seqs: Shaped[Tensor, ""] | float | int | None,
) -> Float[Tensor, ""]:
    """Return Σ_b s_b · (Σ_t m_bt·v_bt / Σ_t m_bt) / N_seqs: every sequence counts once, however long it is.

    N_seqs is global_valid_seqs, or Σ_b s_b if that is None.

    Shapes: values and mask are [B, T], sample_mask (s) is [B], global_valid_seqs is a scalar. Returns a scalar.
    """
    return masked_mean(masked_mean(values, mask, dim=-1), sample_mask, global_normalization_factor=global_valid_seqs)


def masked_min(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the minimum over positions with m ≠ 0, a scalar; +∞ if there are none, so that parts combine by min."""
    kept = torch.where(mask != 0, values, torch.inf).flatten()
    return torch.cat([kept, kept.new_full((1,), torch.inf)]).amin()


def masked_max(values: Float[Tensor, "*shape"], mask: Shaped[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Return the maximum over positions with m ≠ 0, a scalar; −∞ if there are none, so that parts combine by max."""
    return -masked_min(-values, mask)


def bounded_exp(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp(clamp(log_ratio, ±MAX_LOG_RATIO)). It is always finite, and its gradient is 0 where it saturates."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_penalty(
    logprobs: Float[Tensor, "*shape"],
    logprobs_reference: Float[Tensor, "*shape"],
    kind: str = "k3",
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
    weights: Float[Tensor, "*shape"] | None = None,
) -> Float[Tensor, "*shape"]:
    """Return the per-token estimate of KL(π‖π_ref) from tokens that were sampled from π.

        k1 = −x          k2 = x²/2          k3 = eˣ − 1 − x,        with x = clamp(log π_ref − log π, ±input_clamp)

    The estimate is multiplied by `weights` and then clamped to ±output_clamp. k1 and k3 are unbiased; k3 is never
    negative. If the input clamp changes x, the token's weight is treated as a constant, so that the token has no
    gradient at all.

    Args:
        logprobs: log π of the sampled tokens.
        logprobs_reference: log π_ref of the same tokens.
        kind: The estimator: "k1", "k2" or "k3".
        input_clamp: The bound of the log-ratio; None disables the clamp.
        output_clamp: The bound of the result; None disables the clamp.
        weights: The factor of each token; None stands for 1.

    Raises:
        ValueError: `kind` is unknown.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    difference = logprobs_reference - logprobs
    x = difference if input_clamp is None else difference.clamp(-input_clamp, input_clamp)
    if kind == "k1":
        kl = -x
    elif kind == "k2":
        kl = 0.5 * x.square()
    elif kind == "k3":
        kl = torch.expm1(x.clamp(max=_LARGEST_EXPONENT)) - x
    else:
        raise ValueError(f"kind={kind!r} must be 'k1', 'k2' or 'k3'")
    if weights is not None:
        kl = kl * torch.where(x == difference, weights, weights.detach())
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def score_function_weight(logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return e^{lp − sg(lp)} (lp: logprobs, sg: stop-gradient). Its value is 1, and its gradient is ∇lp.

    A KL estimate k multiplied by this weight has the additional gradient term k·∇log π. Without this term, the gradient
    of E_π[k] would ignore that the expectation itself depends on π.

    Source: Tang & Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL" (arXiv:2506.09477).
    """
    return (logprobs - logprobs.detach()).exp()


def importance_weight(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return exp(log_ratio), or 0 if that is NaN or infinite, so that such tokens are left out."""
    representable = torch.isfinite(log_ratio.exp())
    # Without the inner `where`, the derivative at an overflow would be 0 · ∞ = NaN.
    return torch.where(representable, torch.where(representable, log_ratio, 0.0).exp(), 0.0)


def sequence_log_ratio(
    log_ratio: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
) -> Float[Tensor, "batch tokens"]:
    """Return the mean of the log-ratio over each sequence's tokens, repeated at every token of the sequence.

    It is the logarithm of the geometric mean of the tokens' ratios.

    Source: Zheng et al. 2025, "Group Sequence Policy Optimization" (arXiv:2507.18071), eq. 7.
    """
    return masked_mean(log_ratio, mask, dim=-1)[:, None].expand_as(log_ratio)


def clip_ratio(ratio: Float[Tensor, "*shape"], below: float, above: float) -> Float[Tensor, "*shape"]:
    """Return clip(r, 1 − below, 1 + above)."""
    return ratio.clamp(1.0 - below, 1.0 + above)


def clipped_surrogate(
    advantages: Float[Tensor, "*shape"],
    ratio: Float[Tensor, "*shape"],
    clipped_ratio: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return −min(r·A, clip(r)·A), PPO's pessimistic bound.

    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms" (arXiv:1707.06347), eq. 7. Two separate clip
    bounds: Yu et al. 2025, "DAPO" (arXiv:2503.14476).
    """
    return torch.maximum(-advantages * ratio, -advantages * clipped_ratio)


def dual_clip(
    surrogate: Float[Tensor, "*shape"],
    advantages: Float[Tensor, "*shape"],
    ceiling: float,
) -> Float[Tensor, "*shape"]:
    """Return min(surrogate, −c·A) if A < 0, and the surrogate otherwise, with c = ceiling > 1.

    This bounds the loss of a token with A < 0 whose ratio is far above 1.

    Source: Ye et al. 2019, "Mastering Complex Control in MOBA Games with Deep RL" (arXiv:1912.09729), eq. 3.
    """
    return torch.where(advantages < 0, torch.minimum(surrogate, -advantages * ceiling), surrogate)


def cispo_surrogate(
    advantages: Float[Tensor, "*shape"],
    clipped_ratio: Float[Tensor, "*shape"],
    logprobs: Float[Tensor, "*shape"],
) -> Float[Tensor, "*shape"]:
    """Return −sg(clip(r))·A·log π. The clipped ratio is a constant weight, so that clipped tokens keep their gradient.

    Source: MiniMax 2025, "MiniMax-M1" (arXiv:2506.13585), eq. 4.
    """
    return -advantages * clipped_ratio.detach() * logprobs


def geometric_mean_surrogate(
    advantages: Float[Tensor, "batch tokens"],
    ratio: Float[Tensor, "batch tokens"],
    clipped_ratio: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
) -> Float[Tensor, "batch tokens"]:
    """Return −A·(Π r)^{1/|y|} at every token, with each r clipped only from above if A > 0, otherwise only from below.

    Source: Zhao et al. 2025, "Geometric-Mean Policy Optimization" (arXiv:2507.20673), eq. 4.
    """
    pessimistic = torch.where(advantages > 0, torch.minimum(ratio, clipped_ratio), torch.maximum(ratio, clipped_ratio))
    return -advantages * sequence_log_ratio(pessimistic.log(), mask).exp()


def soft_surrogate(
    advantages: Float[Tensor, "*shape"],
    ratio: Float[Tensor, "*shape"],
    temperature_pos: float,
    temperature_neg: float,
) -> Float[Tensor, "*shape"]:
    """Return −A·(4/τ)·σ( τ·(r − 1) ). Its gradient is PPO's at r = 1, and fades as r moves away from 1.

    τ is temperature_pos if A > 0, and temperature_neg otherwise.

    Source: Gao et al. 2025, "Soft Adaptive Policy Optimization" (arXiv:2511.20347), eq. 5.
    """
    _require_positive(temperature_pos=temperature_pos, temperature_neg=temperature_neg)
    temperature = torch.where(advantages > 0, torch.full_like(advantages, temperature_pos), temperature_neg)
    return -advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature


def penalised_surrogate(
    advantages: Float[Tensor, "*shape"], ratio: Float[Tensor, "*shape"], coefficient: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return −A·r + c·|log r|, with a coefficient c for each token.

    |log r| below 1e-4 counts as 0. If the policy has not changed, rounding alone would otherwise set the sign of the
    gradient.

    Source: Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models"
    (arXiv:2505.22617), eq. 13, with |log r| as the estimate of the KL, as in the authors' code.
    """
    distance = ratio.log().abs()
    return -advantages * ratio + coefficient * torch.where(distance < _ROUNDING, 0.0, distance)


def geometric_mean_outside(
    log_ratio: Float[Tensor, "batch tokens"], mask: Shaped[Tensor, "batch tokens"], low: float, high: float
) -> Bool[Tensor, "batch tokens"]:
    """Return, for every token, whether the geometric mean of exp(log_ratio) over its sequence is outside [low, high].

    It also counts as outside if an unmasked log_ratio of the sequence is NaN or infinite.
    """
    log_mean = masked_mean(log_ratio, mask, dim=-1)
    inside = log_mean.isfinite() & (log_mean.exp() >= low) & (log_mean.exp() <= high)
    return ~inside[:, None].expand_as(log_ratio)


def mean_k3_above(
    log_ratio: Float[Tensor, "batch tokens"], mask: Shaped[Tensor, "batch tokens"], high: float
) -> Bool[Tensor, "batch tokens"]:
    """Return, for every token, whether the mean of eˣ − 1 − x over its sequence is above `high`, with x = log_ratio.

    For x = log π_prev/π_generation the mean is the k3 estimate of KL(π_generation‖π_prev), see `kl_penalty`. It counts
    as above `high` if an unmasked x is NaN or infinite.
    """
    k3 = kl_penalty(torch.zeros_like(log_ratio), log_ratio, "k3", MAX_LOG_RATIO, output_clamp=None)
    k3 = torch.where(log_ratio.isfinite(), k3, torch.inf)
    return (masked_mean(k3, mask, dim=-1) > high)[:, None].expand_as(log_ratio)


def any_token_below(
    log_ratio: Float[Tensor, "batch tokens"], mask: Shaped[Tensor, "batch tokens"], low: float
) -> Bool[Tensor, "batch tokens"]:
    """Return, for every token, whether an unmasked log_ratio of its sequence is NaN, infinite or below log(low).

    Raises:
        ValueError: `low` is not above 0.
    """
    _require_positive(low=low)
    below = ~(log_ratio.isfinite() & (log_ratio >= math.log(low))) & (mask != 0)
    return below.any(-1, keepdim=True).expand_as(log_ratio)


def truncated_weights(
    weights: Float[Tensor, "*shape"],
    low: float,
    high: float,
) -> tuple[Float[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """Return (clamp(w, low, high), whether w was outside [low, high]).

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (TIS).
    """
    return weights.clamp(low, high), (weights < low) | (weights > high)


def icepop_weights(
    weights: Float[Tensor, "*shape"],
    low: float,
    high: float,
) -> tuple[Float[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """Return (w, or 0 if w is outside [low, high]; whether w was outside).

    Source: Ling team 2025, "Small Leak Can Sink a Great Ship: Boost RL Training on MoE with IcePop".
    """
    outside = (weights < low) | (weights > high)
    return torch.where(outside, 0.0, weights), outside


def sequence_masked_weights(
    weights: Float[Tensor, "batch tokens"],
    log_ratio: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    low: float,
    high: float,
) -> tuple[Float[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
    """Return (w, or 0 if the token's sequence is outside [low, high]; whether it is outside).

    A sequence is outside if the geometric mean of exp(log_ratio) over its tokens is outside.

    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch".
    """
    outside = geometric_mean_outside(log_ratio, mask, low, high)
    return torch.where(outside, 0.0, weights), outside


def js_divergence(logprobs: Float[Tensor, "*shape"], other: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return ½·k3(x) + ½·k3(x') with x = log π − log M, x' = log π' − log M and M = ½(π + π').

    It is symmetric and never negative.

    Source: the k3 estimator of `kl_penalty`, applied to both halves of the Jensen-Shannon divergence.
    """
    log_mixture = torch.logaddexp(logprobs, other) - math.log(2.0)
    halves = [kl_penalty(log_mixture, x, "k3", MAX_LOG_RATIO, output_clamp=None) for x in (logprobs, other)]
    return 0.5 * (halves[0] + halves[1])


def squared_error(values: Float[Tensor, "*shape"], returns: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return ½·(v − R)²."""
    return 0.5 * (values - returns).square()


def clipped_squared_error(
    values: Float[Tensor, "*shape"],
    old_values: Float[Tensor, "*shape"],
    returns: Float[Tensor, "*shape"],
    clip_range: float,
) -> tuple[Float[Tensor, "*shape"], Bool[Tensor, "*shape"]]:
    """Return (½·max( (v − R)², (clip(v, v_old ± clip_range) − R)² ), whether the clipped error is the larger of both).

    Source: OpenAI baselines, ppo2/model.py.
    """
    clipped = squared_error(torch.clamp(values, old_values - clip_range, old_values + clip_range), returns)
    unclipped = squared_error(values, returns)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def bradley_terry(margin: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return −log σ(margin), the negative log-likelihood that the chosen answer wins if its reward is larger by margin.

    Source: Bradley & Terry 1952; as a loss on rewards: Christiano et al. 2017 (arXiv:1706.03741).
    """
    return -logsigmoid(margin)


def log_odds(logprobs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return log P/(1 − P) for P = exp(logprobs). Logprobs above −1e-6 are clamped to it, with gradient 0.

    Source: Hong et al. 2024, "ORPO" (arXiv:2403.07691), eq. 4.
    """
    bounded = logprobs.clamp(max=_LARGEST_LOGPROB)
    return bounded - torch.log(-torch.expm1(bounded))


def identity_preference(margin: Float[Tensor, "*shape"], tau: float) -> Float[Tensor, "*shape"]:
    """Return (margin − 1/(2τ))². It has a minimum at a finite margin, whereas −log σ(margin) decreases forever.

    Source: Azar et al. 2023, "A General Theoretical Paradigm to Understand Learning from Human Preferences"
    (arXiv:2310.12036), eq. 17.
    """
    _require_positive(tau=tau)
    return (margin - 1.0 / (2.0 * tau)).square()


def _require_positive(**settings: float) -> None:
    for name, value in settings.items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be above 0")

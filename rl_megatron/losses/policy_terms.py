"""The summands of policy gradient losses: functions of `PolicyTokens`, each made once, from the settings.

A summand returns what it adds to the loss and the metrics it reports. Which functions it is made of (which ratio, which
surrogate, which weights, which average) is settled when it is made: evaluating it asks nothing of the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rl_megatron.losses import functional as F
from rl_megatron.losses.batch import TokenStreams
from rl_megatron.losses.clipped_pg_config import ClippedPGLossConfig
from rl_megatron.losses.interfaces import Count
from rl_megatron.losses.mismatch import mismatch_metrics


@dataclass(frozen=True)
class PolicyTokens:
    """What summands read: [B, S-1] streams with masked positions 0, and the averages over the global batch."""

    streams: TokenStreams
    logprobs: Tensor
    prev: Tensor | None
    entropy: Tensor | None
    global_valid_seqs: Count
    global_valid_toks: Count

    def token_mean(self, values: Tensor) -> Tensor:
        return F.masked_mean(values, self.streams.mask, global_normalization_factor=self.global_valid_toks)

    def sequence_mean(self, values: Tensor) -> Tensor:
        return F.sequence_mean(values, self.streams.mask, self.streams.sample_mask, self.global_valid_seqs)

    @property
    def unfiltered_logprobs(self) -> Tensor:
        """Where logprobs were filtered (top-k, top-p), data["curr_logprobs_unfiltered"] [B, S-1]: what meets the
        reference, whose logprobs never are filtered."""
        key = "curr_logprobs_unfiltered"
        return self.streams.select(f"data[{key!r}]", self.streams.data[key]) if key in self.streams else self.logprobs

    @property
    def global_positive_toks(self) -> Count:
        """data["global_positive_toks"], a scalar or repeated per sample, where the batch counts them."""
        key = "global_positive_toks"
        if key not in self.streams:
            return self.global_valid_toks
        return torch.as_tensor(self.streams.data[key]).flatten()[:1].sum()


Term = Callable[[PolicyTokens], tuple[Tensor | float, dict[str, Tensor]]]
Average = Callable[[PolicyTokens, Tensor], Tensor]  # [B, S-1] → this part's share of a mean
Ratio = Callable[[PolicyTokens], tuple[Tensor, Tensor]]  # → ratio, clipped ratio
Surrogate = Callable[[PolicyTokens, Tensor, Tensor], Tensor]  # tokens, ratio, clipped ratio → ℓ
Weights = Callable[[PolicyTokens], tuple[Tensor, Tensor]]  # → w, whether it was outside its bounds


def choose_average(cfg: ClippedPGLossConfig) -> Average:
    """What the loss is a mean over: tokens, sequences of a length taken as fixed, or sequences."""

    def over_fixed_lengths(tokens: PolicyTokens, values: Tensor) -> Tensor:
        count = tokens.global_valid_seqs * cfg.fixed_sequence_length
        return F.masked_mean(values, tokens.streams.mask, global_normalization_factor=count)

    if cfg.fixed_sequence_length is not None:
        return over_fixed_lengths
    return _average(per_token=cfg.token_level_loss)


def _average(per_token: bool) -> Average:
    return PolicyTokens.token_mean if per_token else PolicyTokens.sequence_mean


def choose_prev(cfg: ClippedPGLossConfig) -> Callable[[TokenStreams, Tensor], Tensor | None]:
    """log π_prev: what the batch has, which a loss may do without, or sg(log π)."""

    def rolled_out(streams: TokenStreams, logprobs: Tensor) -> Tensor | None:
        return streams["prev_logprobs"] if "prev_logprobs" in streams else None

    def on_policy(streams: TokenStreams, logprobs: Tensor) -> Tensor:
        return logprobs.detach()

    return on_policy if cfg.force_on_policy_ratio else rolled_out


def surrogate_term(cfg: ClippedPGLossConfig, average: Average) -> Term:
    """mean( w·ℓ ), and the ratio's metrics."""
    ratio_of, surrogate_of = choose_ratio(cfg), choose_surrogate(cfg)

    def term(tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, clipped = ratio_of(tokens)
        return average(tokens, surrogate_of(tokens, ratio, clipped)), _ratio_metrics(tokens, ratio, clipped)

    return term


def choose_ratio(cfg: ClippedPGLossConfig) -> Ratio:
    clip = partial(F.clip_ratio, below=cfg.ratio_clip_min, above=cfg.ratio_clip_max)

    def forced_on_policy(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
        ratio = F.score_function_weight(tokens.logprobs)
        return ratio, ratio

    def reinforce(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
        return tokens.logprobs, tokens.logprobs

    def per_sequence(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
        ratio = F.bounded_exp(F.sequence_log_ratio(tokens.logprobs - tokens.prev, tokens.streams.mask))
        return ratio, clip(ratio)

    def per_token(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
        ratio = F.bounded_exp(tokens.logprobs - tokens.prev)
        return ratio, clip(ratio)

    if cfg.force_on_policy_ratio:
        return forced_on_policy
    if cfg.disable_ppo_ratio:
        return reinforce
    return per_sequence if cfg.sequence_level_importance_ratios else per_token


def choose_surrogate(cfg: ClippedPGLossConfig) -> Surrogate:
    weights_of = choose_weights(cfg)

    def clipped(tokens: PolicyTokens, ratio: Tensor, clipped_ratio: Tensor) -> Tensor:
        return F.clipped_surrogate(tokens.streams["advantages"], ratio, clipped_ratio)

    def dual_clipped(tokens: PolicyTokens, ratio: Tensor, clipped_ratio: Tensor) -> Tensor:
        return F.dual_clip(clipped(tokens, ratio, clipped_ratio), tokens.streams["advantages"], cfg.ratio_clip_c)

    def cispo(tokens: PolicyTokens, ratio: Tensor, clipped_ratio: Tensor) -> Tensor:
        return F.cispo_surrogate(tokens.streams["advantages"], clipped_ratio, tokens.logprobs)

    surrogate = cispo if cfg.use_cispo else clipped if cfg.ratio_clip_c is None else dual_clipped

    def corrected(tokens: PolicyTokens, ratio: Tensor, clipped_ratio: Tensor) -> Tensor:
        return weights_of(tokens)[0] * surrogate(tokens, ratio, clipped_ratio)

    return corrected if cfg.use_importance_sampling_correction else surrogate


def choose_weights(cfg: ClippedPGLossConfig) -> Weights:
    """π_prev/π_generation, of tokens or under GSPO of sequences, and what truncation makes of it."""
    low, high = cfg.truncated_importance_sampling_ratio_min or 0.0, cfg.truncated_importance_sampling_ratio

    def of_tokens(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return F.importance_weight(log_ratio)

    def of_sequences(log_ratio: Tensor, mask: Tensor) -> Tensor:
        return F.importance_weight(F.masked_sum(log_ratio, mask, dim=-1)[:, None].expand_as(log_ratio))

    def untruncated(weights: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return weights, torch.zeros_like(weights, dtype=torch.bool)

    def tis(weights: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return F.truncated_weights(weights, low, high)

    def icepop(weights: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return F.icepop_weights(weights, low, high)

    def sequence_mask(weights: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return F.sequence_masked_weights(weights, log_ratio, mask, low, high)

    weights_of = of_sequences if cfg.sequence_level_importance_ratios else of_tokens
    kinds = {None: untruncated, "tis": tis, "icepop": icepop, "seq-mask-tis": sequence_mask}
    truncate = kinds[cfg.truncated_importance_sampling_type]

    def weights(tokens: PolicyTokens) -> tuple[Tensor, Tensor]:
        log_ratio, mask = tokens.prev - tokens.streams["generation_logprobs"], tokens.streams.token_mask
        return truncate(weights_of(log_ratio, mask), log_ratio, mask)

    return weights


def kl_term(cfg: ClippedPGLossConfig, average: Average) -> Term:
    """β·mean( KL(π‖π_ref) )."""
    estimate = partial(
        F.kl_penalty, kind=cfg.reference_policy_kl_type, input_clamp=cfg.kl_input_clamp_value,
        output_clamp=cfg.kl_output_clamp_value,
    )  # fmt: skip

    def of_score_function(tokens: PolicyTokens, logprobs: Tensor) -> Tensor:
        return F.score_function_weight(logprobs)

    def of_generation(tokens: PolicyTokens, logprobs: Tensor) -> Tensor:
        return F.importance_weight(logprobs - tokens.streams["generation_logprobs"])

    weights = of_generation if cfg.use_on_policy_kl_approximation else of_score_function

    def term(tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, reference = tokens.unfiltered_logprobs, tokens.streams["reference_policy_logprobs"]
        kl = average(tokens, estimate(logprobs, reference, weights=weights(tokens, logprobs)))
        return cfg.kl_coefficient * kl, {"kl_penalty": kl}

    return term


def positive_nll_term(weight: float) -> Term:
    """μ·NLL⁺, the sum of −log π over tokens of samples with a positive reward, over a global count (see the loss)."""

    def term(tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        rewards = tokens.streams.per_sample("rewards")
        positive = torch.where(rewards.isnan(), rewards, (rewards > 0).to(rewards))  # NaN stays: it is no reward of 0
        mask = tokens.streams.mask * positive[:, None]
        nll = F.masked_mean(-tokens.logprobs, mask, global_normalization_factor=tokens.global_positive_toks)
        return weight * nll, {"positive_nll_loss": nll}

    return term


def entropy_term(coefficient: float, average: Average) -> Term:
    """−c_H·mean( H )."""

    def term(tokens: PolicyTokens) -> tuple[Tensor, dict[str, Tensor]]:
        if tokens.entropy is None:
            raise ValueError(f"entropy_coeff={coefficient} needs next_token_entropy beside next_token_logprobs")
        return -coefficient * average(tokens, tokens.entropy), entropy_report(tokens)[1]

    return term


def entropy_report(tokens: PolicyTokens) -> tuple[float, dict[str, Tensor]]:
    """The mean entropy, where it is given."""
    return 0.0, {} if tokens.entropy is None else {"entropy": tokens.token_mean(tokens.entropy)}


def generation_report(cfg: ClippedPGLossConfig) -> Term:
    """How far π_prev is from the engine that generated the tokens, where the batch has what that engine said."""
    weights_of = choose_weights(cfg)
    weight_mean = _average(per_token=not cfg.sequence_level_importance_ratios)
    outside_mean = _average(per_token=cfg.truncated_importance_sampling_type != "seq-mask-tis")
    truncates = cfg.truncated_importance_sampling_type is not None

    def report(tokens: PolicyTokens) -> tuple[float, dict[str, Tensor]]:
        if tokens.prev is None or "generation_logprobs" not in tokens.streams:
            return 0.0, {}
        generation = tokens.streams["generation_logprobs"]
        weights, outside = weights_of(tokens)
        metrics = mismatch_metrics(tokens.prev, generation, tokens.token_mean, cfg.reference_policy_kl_type)
        metrics["sampling_importance_ratio"] = weight_mean(tokens, weights)
        metrics["approx_entropy"] = -tokens.token_mean(F.bounded_exp(tokens.logprobs - generation) * tokens.logprobs)
        return 0.0, metrics | ({"is_oob_ratio": outside_mean(tokens, outside.to(weights))} if truncates else {})

    return report


def nothing(metric: str) -> Term:
    """A summand that is switched off, and reports 0."""
    return lambda tokens: (0.0, {metric: tokens.streams.mask.new_zeros(())})


def _ratio_metrics(tokens: PolicyTokens, ratio: Tensor, clipped: Tensor) -> dict[str, Tensor]:
    metrics, mask = {"clip_fraction": tokens.token_mean((ratio != clipped).to(ratio))}, tokens.streams.mask
    for name, values in {"probs_ratio": ratio, "probs_ratio_clamped": clipped}.items():
        metrics[name] = tokens.token_mean(values)
        metrics[f"{name}_min"], metrics[f"{name}_max"] = F.masked_min(values, mask), F.masked_max(values, mask)
    return metrics

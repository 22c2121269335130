"""The clipped policy gradient family: PPO, GRPO, DAPO, REINFORCE, RLOO, GSPO, CISPO, with their corrections.

    L = mean( w·ℓ ) + β·mean( KL ) + μ·NLL⁺ − c_H·mean( H )

ℓ is the surrogate, w the correction for the generation engine's probabilities. Which functions make up ℓ, w and the
mean is chosen once, from the settings, when the loss is built; the formula is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl_megatron.losses import functional as F
from rl_megatron.losses.batch import TokenStreams
from rl_megatron.losses.clipped_pg_config import ClippedPGLossConfig
from rl_megatron.losses.interfaces import Count, LogprobLoss, LossType, Reduction
from rl_megatron.losses.mismatch import MISMATCH_METRICS, mismatch_metrics
from rl_megatron.losses.registry import register
from rl_megatron.losses.settings import parse_settings

Ratio = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # logprobs, prev, mask → ratio, clipped ratio
Surrogate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # advantages, ratio, clipped ratio, logprobs → ℓ
Correction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # log π_prev/π_generation, mask → w, whether outside
Mean = Callable[[Tensor], Tensor]  # [B, T] → this part's share of the mean


@register("clipped_pg")
class ClippedPGLossFn(LogprobLoss):
    """L = mean( w·ℓ ) + β·mean( KL(π‖π_ref) ) + μ·NLL⁺ − c_H·mean( H ), by default GRPO's:

        ℓ = −min( r·A, clip(r, 1−ε_min, 1+ε_max)·A ),  r = π/π_prev,  w = 1,  mean over the global batch's tokens

    NLL⁺ is the mean of −log π over tokens of samples with a positive reward. Its denominator has to be a global count,
    or the term would grow with the number of microbatches: data["global_positive_toks"] (that count over the global
    batch, a scalar or repeated per sample) where the batch carries it, which is VAPO's mean; else global_valid_toks,
    which weighs each positive token like any other token of the loss.

    KL is estimated from the sampled tokens and differentiated together with their probability: see
    `functional.score_function_weight`. Log-ratios saturate at ±20, `functional.MAX_LOG_RATIO`.

    Metrics: those of `metric_reductions`. Means are over the global batch's tokens whatever the loss averages over,
    except `loss`, `kl_penalty` (like the loss; without β), `num_valid_samples`, `positive_nll_loss` (see above),
    `sampling_importance_ratio` (over sequences under GSPO) and `is_oob_ratio` (over sequences for seq-mask-tis).
    `clip_fraction` is the share of tokens whose ratio was outside the clip range. With disable_ppo_ratio the ratio
    metrics hold log-probabilities. Generation metrics are present where the batch has generation_logprobs, `entropy`
    where next_token_entropy is given.

    Shapes, Raises: see `Loss.evaluate`; advantages are [B, S] or [B].
    Source: PPO arXiv:1707.06347, GRPO arXiv:2402.03300, REINFORCE/RLOO arXiv:2402.14740, DAPO arXiv:2503.14476, VAPO
        arXiv:2504.05118; the parts of the formula are sourced in `functional`.
    """

    def __init__(self, cfg: Any = None) -> None:
        self.cfg = cfg = parse_settings(ClippedPGLossConfig, cfg)
        self.loss_type = LossType.TOKEN_LEVEL if cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        self._ratio = _choose_ratio(cfg)
        self._surrogate = _choose_surrogate(cfg)
        self._correction = _choose_correction(cfg)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        names = [
            "loss", "probs_ratio", "probs_ratio_clamped", "kl_penalty", "clip_fraction", "num_valid_samples",
            "positive_nll_loss", "entropy", "sampling_importance_ratio", "approx_entropy", *MISMATCH_METRICS,
        ]  # fmt: skip
        if self.cfg.truncated_importance_sampling_type is not None:
            names.append("is_oob_ratio")
        reductions = dict.fromkeys(names, Reduction.SUM)
        for name in ("probs_ratio", "probs_ratio_clamped"):
            reductions |= {f"{name}_min": Reduction.MIN, f"{name}_max": Reduction.MAX}
        return reductions

    @property
    def required_keys(self) -> tuple[str, ...]:
        cfg = self.cfg
        conditional = {
            "prev_logprobs": not cfg.force_on_policy_ratio,
            "generation_logprobs": cfg.use_importance_sampling_correction
            or (cfg.use_on_policy_kl_approximation and cfg.kl_coefficient > 0),
            "reference_policy_logprobs": cfg.kl_coefficient > 0,
            "rewards": cfg.positive_example_nll_weight > 0,
        }
        return (*super().required_keys, "advantages", *(key for key, needed in conditional.items() if needed))

    @property
    def needs_entropy(self) -> bool:
        return self.cfg.entropy_coeff != 0

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        next_token_logprobs: Tensor,
        next_token_entropy: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        cfg = self.cfg
        streams = TokenStreams(data, self, next_token_logprobs)
        logprobs, mask, advantages = streams.logprobs, streams.mask, streams["advantages"]
        prev = logprobs.detach() if cfg.force_on_policy_ratio else streams["prev_logprobs"]
        token_mean = partial(F.masked_mean, mask=mask, global_normalization_factor=global_valid_toks)
        sequence_mean = partial(
            F.sequence_mean, mask=mask, sample_mask=streams.sample_mask, global_valid_seqs=global_valid_seqs
        )
        loss_mean = token_mean if self.loss_type is LossType.TOKEN_LEVEL else sequence_mean

        ratio, clipped_ratio = self._ratio(logprobs, prev, mask)
        surrogate = self._surrogate(advantages, ratio, clipped_ratio, logprobs)
        metrics = {}
        if "generation_logprobs" in streams:
            generation = streams["generation_logprobs"]
            weights, outside = self._correction(prev - generation, mask)
            if cfg.use_importance_sampling_correction:
                surrogate = weights * surrogate
            metrics |= mismatch_metrics(prev, generation, token_mean, cfg.reference_policy_kl_type)
            metrics |= self._correction_metrics(weights, outside, token_mean, sequence_mean)
            metrics["approx_entropy"] = -token_mean(F.bounded_exp(logprobs - generation) * logprobs).detach()

        loss = loss_mean(surrogate)
        kl = self._kl(streams, data, loss_mean) if cfg.kl_coefficient > 0 else torch.zeros_like(loss)
        loss = loss + cfg.kl_coefficient * kl
        positive_nll = torch.zeros_like(loss)
        if cfg.positive_example_nll_weight > 0:
            positive_nll = _positive_nll(streams, data, global_valid_toks)
            loss = loss + cfg.positive_example_nll_weight * positive_nll
        if next_token_entropy is not None:
            entropy = streams.select("next_token_entropy", next_token_entropy)
            metrics["entropy"] = token_mean(entropy).detach()
            if cfg.entropy_coeff > 0:
                loss = loss - cfg.entropy_coeff * loss_mean(entropy)
        elif self.needs_entropy:
            raise ValueError(f"entropy_coeff={cfg.entropy_coeff} needs next_token_entropy beside next_token_logprobs")

        metrics |= _ratio_metrics(ratio.detach(), clipped_ratio.detach(), mask, token_mean)
        metrics |= {
            "loss": loss.detach(),
            "kl_penalty": kl.detach(),
            "positive_nll_loss": positive_nll.detach(),
            "num_valid_samples": streams.sample_mask.sum(),
        }
        return loss, metrics

    def _kl(self, streams: TokenStreams, data: Mapping[str, Any], mean: Mean) -> Tensor:
        """Where the logprobs were filtered (top-k, top-p), data["curr_logprobs_unfiltered"] [B, S-1] is what meets the
        reference, whose logprobs never are filtered."""
        cfg, logprobs = self.cfg, streams.logprobs
        if "curr_logprobs_unfiltered" in data:
            logprobs = streams.select("curr_logprobs_unfiltered", data["curr_logprobs_unfiltered"])
        if cfg.use_on_policy_kl_approximation:
            weights = F.importance_weight(logprobs - streams["generation_logprobs"])
        else:
            weights = F.score_function_weight(logprobs)
        kl = F.kl_penalty(
            logprobs, streams["reference_policy_logprobs"], cfg.reference_policy_kl_type, cfg.kl_input_clamp_value,
            cfg.kl_output_clamp_value, weights,
        )  # fmt: skip
        return mean(kl)

    def _correction_metrics(
        self, weights: Tensor, outside: Tensor, token_mean: Mean, sequence_mean: Mean
    ) -> dict[str, Tensor]:
        mean = sequence_mean if self.cfg.sequence_level_importance_ratios else token_mean
        metrics = {"sampling_importance_ratio": mean(weights)}
        if self.cfg.truncated_importance_sampling_type is not None:
            mean = sequence_mean if self.cfg.truncated_importance_sampling_type == "seq-mask-tis" else token_mean
            metrics["is_oob_ratio"] = mean(outside.to(weights))
        return metrics


def _choose_ratio(cfg: ClippedPGLossConfig) -> Ratio:
    def clip(ratio: Tensor) -> tuple[Tensor, Tensor]:
        return ratio, ratio.clamp(1.0 - cfg.ratio_clip_min, 1.0 + cfg.ratio_clip_max)

    def forced_on_policy(logprobs: Tensor, prev: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        ratio = F.score_function_weight(logprobs)
        return ratio, ratio

    def reinforce(logprobs: Tensor, prev: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs, logprobs

    def per_sequence(logprobs: Tensor, prev: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return clip(F.bounded_exp(F.sequence_log_ratio(logprobs - prev, mask)))

    def per_token(logprobs: Tensor, prev: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return clip(F.bounded_exp(logprobs - prev))

    if cfg.force_on_policy_ratio:
        return forced_on_policy
    if cfg.disable_ppo_ratio:
        return reinforce
    return per_sequence if cfg.sequence_level_importance_ratios else per_token


def _choose_surrogate(cfg: ClippedPGLossConfig) -> Surrogate:
    def clipped(advantages: Tensor, ratio: Tensor, clipped_ratio: Tensor, logprobs: Tensor) -> Tensor:
        return F.clipped_surrogate(advantages, ratio, clipped_ratio)

    def dual_clipped(advantages: Tensor, ratio: Tensor, clipped_ratio: Tensor, logprobs: Tensor) -> Tensor:
        return F.dual_clip(F.clipped_surrogate(advantages, ratio, clipped_ratio), advantages, cfg.ratio_clip_c)

    def cispo(advantages: Tensor, ratio: Tensor, clipped_ratio: Tensor, logprobs: Tensor) -> Tensor:
        return F.cispo_surrogate(advantages, clipped_ratio, logprobs)

    if cfg.use_cispo:
        return cispo
    return clipped if cfg.ratio_clip_c is None else dual_clipped


def _choose_correction(cfg: ClippedPGLossConfig) -> Correction:
    low, high = cfg.truncated_importance_sampling_ratio_min or 0.0, cfg.truncated_importance_sampling_ratio

    def weights_of(log_ratio: Tensor, mask: Tensor) -> Tensor:
        if cfg.sequence_level_importance_ratios:
            log_ratio = F.masked_sum(log_ratio, mask, dim=-1)[:, None].expand_as(log_ratio)
        return F.importance_weight(log_ratio)

    def untruncated(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        weights = weights_of(log_ratio, mask)
        return weights, torch.zeros_like(weights, dtype=torch.bool)

    def tis(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return F.truncated_weights(weights_of(log_ratio, mask), low, high)

    def icepop(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return F.icepop_weights(weights_of(log_ratio, mask), low, high)

    def sequence_mask(log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return F.sequence_masked_weights(weights_of(log_ratio, mask), log_ratio, mask, low, high)

    kinds = {None: untruncated, "tis": tis, "icepop": icepop, "seq-mask-tis": sequence_mask}
    return kinds[cfg.truncated_importance_sampling_type]


def _positive_nll(streams: TokenStreams, data: Mapping[str, Any], global_valid_toks: Count) -> Tensor:
    """−Σ log π over tokens of samples with a positive reward, divided by a global count (see the class)."""
    positive = streams.mask * (streams.per_sample("rewards") > 0)[:, None]
    count = global_valid_toks
    if "global_positive_toks" in data:
        count = torch.as_tensor(data["global_positive_toks"]).flatten()[:1].sum()
    return F.masked_mean(-streams.logprobs, positive, global_normalization_factor=count)


def _ratio_metrics(ratio: Tensor, clipped: Tensor, mask: Tensor, token_mean: Mean) -> dict[str, Tensor]:
    metrics = {"clip_fraction": token_mean((ratio != clipped).to(ratio))}
    for name, values in {"probs_ratio": ratio, "probs_ratio_clamped": clipped}.items():
        metrics[name] = token_mean(values)
        metrics[f"{name}_min"], metrics[f"{name}_max"] = F.masked_min(values, mask), F.masked_max(values, mask)
    return metrics

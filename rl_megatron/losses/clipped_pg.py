"""The clipped policy gradient loss, which covers PPO, GRPO, DAPO, REINFORCE, RLOO, GSPO, CISPO, GMPO and SAPO.

    L = mean( w·ℓ ) + β·mean( KL ) + μ·NLL⁺ − c_H·mean( H )

ℓ is the surrogate; w is the correction for the generation engine's probabilities. `ClippedPGLossFn.evaluate` computes,
in this order, ratio, surrogate, importance weight, means, KL, NLL and entropy; the functions below compute these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NotRequired, TypedDict

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.losses import functional as F
from rl_megatron.losses.base import LogprobLoss
from rl_megatron.losses.contract import Count, CountOfSequences, LossType, Reduction
from rl_megatron.losses.mismatch import MISMATCH_MAXIMA, MISMATCH_MEANS, mismatch_metrics
from rl_megatron.losses.registry import register_loss
from rl_megatron.losses.streams import TokenStreams, require

POSITIVE_TOKENS = "global_positive_toks"


class ClippedPGLossDataDict(TypedDict):
    """The batch of `ClippedPGLossFn`. Streams are [B, S] and aligned with input_ids. Their first column is not used.

    Attributes:
        input_ids: Token ids.
        advantages: Advantages, [B, S] or [B].
        prev_logprobs: log π_prev. Without it, π_prev is the policy of this forward pass, which is right for the first
            update after the completions were sampled.
        generation_logprobs: log π_generation. It is needed only for the importance sampling correction, the rejection
            of sequences, the on-policy KL approximation and the generation metrics.
        reference_policy_logprobs: log π_ref. It is needed only with a KL penalty in the loss.
        token_mask: Which tokens count.
        sample_mask: Which samples count, [B].
        rewards: Rewards [B]. They are needed only with positive_example_nll_weight.
        global_positive_toks: The number of tokens in samples with a positive reward, over the global batch. Training
            sets it.
        curr_logprobs_unfiltered: log π [B, S-1] before top-k and top-p. The KL reads it instead of the logprobs.
        covariance_mask: 1 at tokens that Clip-Cov or KL-Cov has selected, otherwise 0. Only these two need it.
        temperature: A number, [B] or [B, S]. If the call gives logits, they are divided by it.
    """

    input_ids: Tensor
    advantages: Tensor
    prev_logprobs: NotRequired[Tensor]
    generation_logprobs: NotRequired[Tensor]
    reference_policy_logprobs: NotRequired[Tensor]
    token_mask: Tensor
    sample_mask: Tensor
    rewards: NotRequired[Tensor]
    global_positive_toks: NotRequired[Tensor]
    curr_logprobs_unfiltered: NotRequired[Tensor]
    covariance_mask: NotRequired[Tensor]
    temperature: NotRequired[Tensor]


@register_loss("clipped_pg")
class ClippedPGLossFn(LogprobLoss):
    """The clipped policy gradient loss, L = mean( w·ℓ ) + β·mean( KL(π‖π_ref) ) + μ·NLL⁺ − c_H·mean( H ).

    The defaults are GRPO's:

        ℓ = −min( r·A, clip(r, 1−ε_min, 1+ε_max)·A ),  r = π/π_prev,  w = 1,  mean over the global batch's tokens

    With use_clip_cov, ℓ is 0 at the tokens of data["covariance_mask"]. With use_kl_cov, ℓ = −r·A + c·|log r|·m for the
    mask m. `algorithms/covariances.py` computes the mask once per rollout, from the covariances of all its tokens.

    If the batch has no prev_logprobs, π_prev is π without its gradient, so that r is 1. This is right for the first
    update after the completions were sampled.

    NLL⁺ is the sum of −log π over the tokens of samples with a positive reward, divided by a global count, so that it
    does not grow with the number of microbatches. The count is data["global_positive_toks"] (these tokens in the global
    batch, a scalar or repeated per sample) if the batch has it, which gives VAPO's mean. `MegatronPolicy` sets it in
    every optimizer step. A direct call without it divides by global_valid_toks, so that a token of a positive sample
    weighs as much as in a mean over all tokens.

    The KL is estimated from the sampled tokens, and its gradient includes the gradient of their probability: see
    `functional.score_function_weight`. The log-ratio log π/π_prev saturates at ±20, `functional.MAX_LOG_RATIO`.

    Metrics: see `metric_reductions`. Metrics that are means are over the global batch's tokens, whatever the loss
    averages over. The exceptions are `loss`, `kl_penalty` (averaged like the loss, without β), `num_valid_samples`,
    `positive_nll_loss` (see above), `sampling_importance_ratio` and its square (over sequences under GSPO),
    `is_oob_ratio` (over sequences for seq-mask-tis), `rejected_sequences` and `vetoed_sequences` (shares of sequences).
    `clip_fraction` is the share of tokens whose ratio was outside the clip range. With disable_ppo_ratio the ratio
    metrics are log-probabilities. Generation metrics are present if the batch has generation_logprobs; `entropy` is
    present if next_token_entropy is given.

    For each loss_type, TRL's GRPOTrainer computes the same loss as the settings given here:

    - "dapo": the defaults here.
    - "grpo": token_level_loss=False. With importance_sampling_level="sequence" it is GSPO. TRL also counts sequences
      without tokens in the denominator.
    - "dr_grpo": fixed_sequence_length=max_completion_length.
    - "cispo": use_cispo=True with ratio_clip_min=1, because TRL has no lower bound.
    - "sapo": use_sapo=True with token_level_loss=False.

    TRL's GMPOTrainer computes the same as use_gmpo=True with token_level_loss=False, for advantages that are equal over
    a sequence.

    TRL's "bnpo" differs: it averages the microbatches' means. TRL's delta equals ratio_clip_c only if delta is at least
    1 + ratio_clip_max. TRL's gradient of the KL ignores that sampling depends on π, unless use_bias_correction_kl is
    set. TRL's RLOOTrainer, on-policy, computes the same as disable_ppo_ratio with fixed_sequence_length=1.

    Shapes and errors: see `Loss.evaluate`. Advantages are [B, S] or [B].

    Source: PPO arXiv:1707.06347, GRPO arXiv:2402.03300, REINFORCE/RLOO arXiv:2402.14740, DAPO arXiv:2503.14476, VAPO
    arXiv:2504.05118. `functional` has the sources of the single formulas.
    """

    cfg: ClippedPGLossConfig
    infinite_is_outside: ClassVar[bool] = True  # see `importance_weights`

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(ClippedPGLossConfig, cfg)
        self.loss_type = LossType.TOKEN_LEVEL if self.cfg.token_level_loss else LossType.SEQUENCE_LEVEL

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        ratios = ("probs_ratio", "probs_ratio_clamped")
        return Reduction.table(
            "loss", *ratios, "kl_penalty", "clip_fraction", "num_valid_samples", "positive_nll_loss", "entropy",
            "sampling_importance_ratio", "sampling_importance_ratio_square", "approx_entropy", *MISMATCH_MEANS,
            *(["is_oob_ratio"] if self.cfg.truncation_type is not None else []),
            *(["covariance_fraction"] if self.cfg.uses_covariances else []),
            *(["rejected_sequences"] if self.cfg.rejects_sequences else []),
            *(["vetoed_sequences"] if self.cfg.token_veto_threshold is not None else []),
            minima=[f"{name}_min" for name in ratios],
            maxima=[*(f"{name}_max" for name in ratios), *MISMATCH_MAXIMA],
        )  # fmt: skip

    @property
    def required_keys(self) -> tuple[str, ...]:
        cfg = self.cfg
        approximates = cfg.use_on_policy_kl_approximation and cfg.kl_coefficient > 0
        conditional = {
            "generation_logprobs": cfg.use_importance_sampling_correction or approximates or cfg.rejects_sequences,
            "reference_policy_logprobs": cfg.kl_coefficient > 0,
            "rewards": cfg.positive_example_nll_weight > 0,
            "prev_logprobs": cfg.uses_covariances,
            "covariance_mask": cfg.uses_covariances,
        }
        return (*super().required_keys, "advantages", *(key for key, needed in conditional.items() if needed))

    @property
    def global_counts(self) -> Mapping[str, CountOfSequences]:
        """Return "global_positive_toks" if the loss divides by it."""
        return {POSITIVE_TOKENS: _positive_tokens} if self.cfg.positive_example_nll_weight > 0 else {}

    @property
    def on_policy_keys(self) -> frozenset[str]:
        """Return "prev_logprobs", unless covariances or a subclass's `evaluate` or `__call__` may need it."""
        replaced = self.has_own_call or type(self).evaluate is not ClippedPGLossFn.evaluate
        return frozenset(() if replaced or self.cfg.uses_covariances else ("prev_logprobs",))

    @property
    def reads_on_policy_keys(self) -> bool:
        """Return whether the ratio, the weight or the rejection reads prev_logprobs."""
        cfg = self.cfg
        corrects = cfg.use_importance_sampling_correction or cfg.rejects_sequences
        return not cfg.force_on_policy_ratio and (not cfg.disable_ppo_ratio or corrects)

    @property
    def needs_entropy(self) -> bool:
        return self.cfg.entropy_coeff != 0

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        next_token_logprobs: Shaped[Tensor, "batch tokens"],
        next_token_entropy: Shaped[Tensor, "batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Return the loss and its metrics from logprobs and, if there is an entropy term, entropies.

        Raises:
            ValueError: entropy_coeff is above 0, but next_token_entropy is None. See also `Loss.evaluate`.
        """
        cfg, streams = self.cfg, self.streams(data, next_token_logprobs)
        means = Means(cfg, streams, global_valid_seqs, global_valid_toks)
        logprobs = streams.select("next_token_logprobs", next_token_logprobs)
        entropy = None if next_token_entropy is None else streams.select("next_token_entropy", next_token_entropy)
        reads_prev = "prev_logprobs" in streams and not cfg.force_on_policy_ratio
        prev = streams["prev_logprobs"] if reads_prev else logprobs.detach()
        generation = streams.get("generation_logprobs")
        metrics: dict[str, Tensor] = {}

        ratio, clipped_ratio = policy_ratio(cfg, logprobs, prev, streams.mask)
        metrics |= ratio_metrics(ratio, clipped_ratio, means)
        selected = streams["covariance_mask"] if cfg.uses_covariances else None
        if selected is not None:
            metrics["covariance_fraction"] = means.over_tokens(selected)
        loss_of_tokens = surrogate_loss(
            cfg, streams["advantages"], ratio, clipped_ratio, logprobs, streams.mask, selected
        )
        if generation is not None:
            weights, outside = importance_weights(cfg, prev, generation, streams.token_mask, self.infinite_is_outside)
            metrics |= generation_metrics(cfg, logprobs, prev, generation, weights, outside, means)
            if cfg.use_importance_sampling_correction:
                loss_of_tokens = weights * loss_of_tokens
            if cfg.rejects_sequences:
                is_vetoed = find_vetoed(cfg, prev, generation, streams.token_mask)
                is_rejected = find_rejected(cfg, prev, generation, streams.token_mask) | is_vetoed
                if cfg.token_veto_threshold is not None:
                    metrics["vetoed_sequences"] = means.over_sequences(is_vetoed.to(loss_of_tokens))
                metrics["rejected_sequences"] = means.over_sequences(is_rejected.to(loss_of_tokens))
                loss_of_tokens = loss_of_tokens * (~is_rejected).to(loss_of_tokens)
        loss = means.reduce_loss(loss_of_tokens)

        kl = nll = streams.mask.new_zeros(())
        if cfg.kl_coefficient > 0:
            kl = means.reduce_loss(self._kl(streams, logprobs, generation))
            loss = loss + cfg.kl_coefficient * kl
        if cfg.positive_example_nll_weight > 0:
            nll = self._positive_nll(streams, logprobs, global_valid_toks)
            loss = loss + cfg.positive_example_nll_weight * nll
        if entropy is not None:
            metrics["entropy"] = means.over_tokens(entropy)
        if cfg.entropy_coeff > 0:
            if entropy is None:
                raise ValueError(f"entropy_coeff={cfg.entropy_coeff} needs next_token_entropy, but got None")
            loss = loss - cfg.entropy_coeff * means.reduce_loss(entropy)

        metrics |= {"kl_penalty": kl, "positive_nll_loss": nll, "loss": loss}
        metrics |= {"num_valid_samples": streams.sample_mask.sum()}
        return loss, {name: metric.detach() for name, metric in metrics.items()}

    def _kl(self, streams: TokenStreams, logprobs: Tensor, generation: Tensor | None) -> Tensor:
        """Return the weighted estimate of KL(π‖π_ref) at every token, [B, S-1].

        If the logprobs were filtered (top-k, top-p), the batch has data["curr_logprobs_unfiltered"] [B, S-1]. The KL
        then uses these instead, because the reference's logprobs are never filtered.
        """
        cfg, unfiltered = self.cfg, "curr_logprobs_unfiltered"
        if unfiltered in streams:
            logprobs = streams.select(f"data[{unfiltered!r}]", streams.data[unfiltered])
        if cfg.use_on_policy_kl_approximation:
            assert generation is not None  # a required key
            weights = F.importance_weight(logprobs - generation)
        else:
            weights = F.score_function_weight(logprobs)
        return F.kl_penalty(
            logprobs, streams["reference_policy_logprobs"], cfg.reference_policy_kl_type, cfg.kl_input_clamp_value,
            cfg.kl_output_clamp_value, weights,
        )  # fmt: skip

    def _positive_nll(self, streams: TokenStreams, logprobs: Tensor, global_valid_toks: Count) -> Tensor:
        """Return the sum of −log π over the tokens of samples with a positive reward, divided by a global count.

        The count is data["global_positive_toks"], a scalar or repeated per sample, if the batch has it, and otherwise
        global_valid_toks.
        """
        rewards, key = streams.per_sample("rewards"), POSITIVE_TOKENS
        positive = torch.where(rewards.isnan(), rewards, (rewards > 0).to(rewards))  # NaN stays NaN
        mask = streams.mask * positive[:, None]
        count = torch.as_tensor(streams.data[key]).flatten()[:1].sum() if key in streams else global_valid_toks
        return F.masked_mean(-logprobs, mask, global_normalization_factor=count)


def _positive_tokens(data: Mapping[str, Any]) -> Float[Tensor, " batch"]:
    """Return the number of tokens that count in each sample with a positive reward, and 0 for other samples."""
    rewards, sample_mask = require(data, "rewards", "ClippedPGLossFn"), data["sample_mask"].double()
    weights = torch.where(rewards > 0, sample_mask, 0.0)
    return (data["token_mask"][:, 1:].double() * weights[:, None]).sum(1)


# --- the means ---


@dataclass(frozen=True)
class Means:
    """Means of [B, S-1] streams over the global batch. Each method returns this batch's share of the mean, a scalar."""

    cfg: ClippedPGLossConfig
    streams: TokenStreams
    global_valid_seqs: Count
    global_valid_toks: Count

    def over_tokens(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        return F.masked_mean(values, self.streams.mask, global_normalization_factor=self.global_valid_toks)

    def over_sequences(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        """Return the mean over sequences of each sequence's mean over its tokens."""
        return F.sequence_mean(values, self.streams.mask, self.streams.sample_mask, self.global_valid_seqs)

    def reduce_loss(self, values: Float[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
        """Return the loss's mean over tokens or sequences, or as if every sequence had fixed_sequence_length tokens."""
        if self.cfg.fixed_sequence_length is not None:
            if self.global_valid_seqs is None:
                raise TypeError(
                    f"fixed_sequence_length={self.cfg.fixed_sequence_length} needs global_valid_seqs, but got None"
                )
            count = self.global_valid_seqs * self.cfg.fixed_sequence_length
            return F.masked_mean(values, self.streams.mask, global_normalization_factor=count)
        return self.over_tokens(values) if self.cfg.token_level_loss else self.over_sequences(values)


# --- the ratio and the surrogate ---


def policy_ratio(
    cfg: ClippedPGLossConfig,
    logprobs: Float[Tensor, "batch tokens"],
    prev_logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
) -> tuple[Float[Tensor, "batch tokens"], Float[Tensor, "batch tokens"]]:
    """Return (ratio π/π_prev, clipped ratio) of every token.

    With disable_ppo_ratio both are the logprobs themselves, and prev_logprobs is not read.

    Shapes: logprobs, prev_logprobs, mask and both results are [B, S-1].
    """
    if cfg.force_on_policy_ratio:
        ratio = F.score_function_weight(logprobs)
        return ratio, ratio
    if cfg.disable_ppo_ratio:
        return logprobs, logprobs
    log_ratio = logprobs - prev_logprobs
    if cfg.sequence_level_importance_ratios:
        log_ratio = F.sequence_log_ratio(log_ratio, mask)
    if cfg.use_gmpo:  # GMPO's clip range bounds the log-ratio
        return F.bounded_exp(log_ratio), F.bounded_exp(log_ratio.clamp(-cfg.ratio_clip_min, cfg.ratio_clip_max))
    ratio = F.bounded_exp(log_ratio)
    return ratio, F.clip_ratio(ratio, below=cfg.ratio_clip_min, above=cfg.ratio_clip_max)


def surrogate_loss(
    cfg: ClippedPGLossConfig,
    advantages: Float[Tensor, "batch tokens"],
    ratio: Float[Tensor, "batch tokens"],
    clipped_ratio: Float[Tensor, "batch tokens"],
    logprobs: Float[Tensor, "batch tokens"],
    mask: Shaped[Tensor, "batch tokens"],
    selected: Float[Tensor, "batch tokens"] | None = None,
) -> Float[Tensor, "batch tokens"]:
    """Return the loss of every token: the surrogate of the configured method, by default PPO's.

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


# --- the correction for the generation engine, and the rejection of sequences ---


def importance_weights(
    cfg: ClippedPGLossConfig,
    prev_logprobs: Float[Tensor, "batch tokens"],
    generation_logprobs: Float[Tensor, "batch tokens"],
    token_mask: Float[Tensor, "batch tokens"],
    infinite_is_outside: bool = True,
) -> tuple[Float[Tensor, "batch tokens"], Bool[Tensor, "batch tokens"]]:
    """Return (π_prev/π_generation after truncation, whether it was outside the bounds) for every token.

    Under GSPO the weight is per sequence: the product over the sequence's tokens. A NaN or infinite weight becomes 0.

    Shapes: all tensor arguments and both results are [B, S-1]. `token_mask` does not include the sample's weight.

    Args:
        cfg: The loss's settings.
        prev_logprobs: log π_prev.
        generation_logprobs: log π_generation.
        token_mask: The tokens that count.
        infinite_is_outside: Whether a weight that is NaN or infinite is outside every bound. If False, it is truncated
            like a weight of 0 (`tis` raises it to the lower bound), and a token's ratio that is NaN or infinite counts
            as 1 in the sequence's geometric mean, as in NeMo RL.
    """
    log_ratio = prev_logprobs - generation_logprobs
    log_weight = log_ratio
    if cfg.sequence_level_importance_ratios:
        log_weight = F.masked_sum(log_ratio, token_mask, dim=-1)[:, None].expand_as(log_ratio)
    weights = F.importance_weight(log_weight)
    high, low = cfg.truncated_importance_sampling_ratio, cfg.truncated_importance_sampling_ratio_min or 0.0
    if cfg.truncation_type is None or high is None:
        return weights, torch.zeros_like(weights, dtype=torch.bool)
    if not infinite_is_outside:
        log_ratio = torch.nan_to_num(log_ratio, nan=0.0, posinf=0.0, neginf=0.0)
    if cfg.truncation_type == "tis":
        truncated, outside = F.truncated_weights(weights, low, high)
    elif cfg.truncation_type == "icepop":
        truncated, outside = F.icepop_weights(weights, low, high)
    else:
        truncated, outside = F.sequence_masked_weights(weights, log_ratio, token_mask, low, high)
    if not infinite_is_outside:
        return truncated, outside
    infinite = ~torch.isfinite(log_weight.exp())
    return torch.where(infinite, 0.0, truncated), outside | infinite


def find_rejected(
    cfg: ClippedPGLossConfig,
    prev_logprobs: Float[Tensor, "batch tokens"],
    generation_logprobs: Float[Tensor, "batch tokens"],
    token_mask: Float[Tensor, "batch tokens"],
) -> Bool[Tensor, "batch tokens"]:
    """Return, for every token, whether sequence_rejection_type rejects its sequence. For vetoes, see `find_vetoed`.

    Shapes: all tensor arguments and the result are [B, S-1]. `token_mask` does not include the sample's weight.

    Source: Liu et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch"; the k3 estimate is `functional.kl_penalty`'s.
    """
    log_ratio, high = (prev_logprobs - generation_logprobs).detach(), cfg.sequence_rejection_max
    if cfg.sequence_rejection_type is None:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    assert high is not None  # the settings check it
    if cfg.sequence_rejection_type == "k3":
        return F.mean_k3_above(log_ratio, token_mask, high)
    return F.geometric_mean_outside(log_ratio, token_mask, cfg.sequence_rejection_min or 0.0, high)


def find_vetoed(
    cfg: ClippedPGLossConfig,
    prev_logprobs: Float[Tensor, "batch tokens"],
    generation_logprobs: Float[Tensor, "batch tokens"],
    token_mask: Float[Tensor, "batch tokens"],
) -> Bool[Tensor, "batch tokens"]:
    """Return, for every token, whether any token of its sequence is vetoed.

    A token is vetoed if its ratio π_prev/π_generation is below token_veto_threshold, NaN or infinite.

    Shapes: all tensor arguments and the result are [B, S-1]. `token_mask` does not include the sample's weight.
    """
    log_ratio = (prev_logprobs - generation_logprobs).detach()
    if cfg.token_veto_threshold is None:
        return torch.zeros_like(log_ratio, dtype=torch.bool)
    return F.any_token_below(log_ratio, token_mask, cfg.token_veto_threshold)


# --- metrics ---


def ratio_metrics(
    ratio: Float[Tensor, "batch tokens"], clipped: Float[Tensor, "batch tokens"], means: Means
) -> dict[str, Float[Tensor, ""]]:
    """Return the share of clipped tokens, and the mean, minimum and maximum of the ratio and of the clipped ratio."""
    mask = means.streams.mask
    metrics = {"clip_fraction": means.over_tokens((ratio != clipped).to(ratio))}
    for name, values in {"probs_ratio": ratio, "probs_ratio_clamped": clipped}.items():
        metrics[name] = means.over_tokens(values)
        metrics[f"{name}_min"], metrics[f"{name}_max"] = F.masked_min(values, mask), F.masked_max(values, mask)
    return metrics


def generation_metrics(
    cfg: ClippedPGLossConfig,
    logprobs: Float[Tensor, "batch tokens"],
    prev_logprobs: Float[Tensor, "batch tokens"],
    generation_logprobs: Float[Tensor, "batch tokens"],
    weights: Float[Tensor, "batch tokens"],
    outside: Bool[Tensor, "batch tokens"],
    means: Means,
) -> dict[str, Float[Tensor, ""]]:
    """Return metrics of the difference between π_prev and π_generation, and of the correction's weights.

    Shapes: all tensor arguments are [B, S-1]; results are scalars.

    Args:
        cfg: The loss's settings.
        logprobs: log π.
        prev_logprobs: log π_prev.
        generation_logprobs: log π_generation.
        weights: The weights of `importance_weights`.
        outside: Which weights were outside their bounds, from `importance_weights`.
        means: The averages over the global batch.
    """
    generation_logprobs = torch.where(generation_logprobs.isnan(), -torch.inf, generation_logprobs)
    metrics = mismatch_metrics(
        prev_logprobs, generation_logprobs, means.streams.mask, means.over_tokens, cfg.reference_policy_kl_type
    )
    weight_mean = means.over_sequences if cfg.sequence_level_importance_ratios else means.over_tokens
    metrics["sampling_importance_ratio"] = weight_mean(weights)
    bounded = weights.clamp(max=math.exp(F.MAX_LOG_RATIO))  # so that its square is finite
    metrics["sampling_importance_ratio_square"] = weight_mean(bounded.square())
    metrics["approx_entropy"] = -means.over_tokens(F.bounded_exp(logprobs - generation_logprobs) * logprobs)
    if cfg.truncation_type is not None:
        outside_mean = means.over_sequences if cfg.truncation_type == "seq-mask-tis" else means.over_tokens
        metrics["is_oob_ratio"] = outside_mean(outside.to(weights))
    return metrics

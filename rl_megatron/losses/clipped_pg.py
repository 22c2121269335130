"""The clipped policy gradient family: PPO, GRPO, DAPO, REINFORCE, RLOO, GSPO, CISPO, with their corrections.

    L = mean( w·ℓ ) + β·mean( KL ) + μ·NLL⁺ − c_H·mean( H )

ℓ is the surrogate, w the correction for the generation engine's probabilities. The summands are made once, from the
settings, when the loss is built (`policy_terms`); evaluating the loss adds them up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl_megatron.losses import policy_terms as terms
from rl_megatron.losses.batch import TokenStreams
from rl_megatron.losses.clipped_pg_config import ClippedPGLossConfig
from rl_megatron.losses.interfaces import Count, LogprobLoss, LossType, Reduction
from rl_megatron.losses.mismatch import MISMATCH_METRICS
from rl_megatron.losses.registry import register
from rl_megatron.losses.settings import parse_settings


@register("clipped_pg")
class ClippedPGLossFn(LogprobLoss):
    """L = mean( w·ℓ ) + β·mean( KL(π‖π_ref) ) + μ·NLL⁺ − c_H·mean( H ), by default GRPO's:

        ℓ = −min( r·A, clip(r, 1−ε_min, 1+ε_max)·A ),  r = π/π_prev,  w = 1,  mean over the global batch's tokens

    NLL⁺ is the mean of −log π over tokens of samples with a positive reward. Its denominator has to be a global count,
    or the term would grow with the number of microbatches: data["global_positive_toks"] (that count over the global
    batch, a scalar or repeated per sample) where the batch carries it, which is VAPO's mean; else global_valid_toks,
    which weighs each positive token like any other token of the loss.

    KL is estimated from the sampled tokens and differentiated together with their probability: see
    `functional.score_function_weight`. The log-ratio log π/π_prev saturates at ±20,
    `functional.MAX_LOG_RATIO`.

    Metrics: those of `metric_reductions`. Means are over the global batch's tokens whatever the loss averages over,
    except `loss`, `kl_penalty` (like the loss; without β), `num_valid_samples`, `positive_nll_loss` (see above),
    `sampling_importance_ratio` (over sequences under GSPO) and `is_oob_ratio` (over sequences for seq-mask-tis).
    `clip_fraction` is the share of tokens whose ratio was outside the clip range. With disable_ppo_ratio the ratio
    metrics hold log-probabilities. Generation metrics are present where the batch has generation_logprobs, `entropy`
    where next_token_entropy is given.

    TRL's GRPOTrainer computes the same with loss_type "dapo" (the defaults here), "grpo" (token_level_loss=False; with
    importance_sampling_level "sequence" it is GSPO), "dr_grpo" (fixed_sequence_length=max_completion_length) and
    "cispo" (ratio_clip_min=1: TRL has no floor); its RLOOTrainer, on-policy, with disable_ppo_ratio and
    fixed_sequence_length=1. Not the same: TRL's "bnpo" is a mean of the microbatches' means; a row without tokens
    counts in the denominator of "grpo"; delta is ratio_clip_c only from 1 + ratio_clip_max on; the KL is differentiated
    without the tokens' probability, unless use_bias_correction_kl is set.

    Shapes, Raises: see `Loss.evaluate`; advantages are [B, S] or [B].
    Source: PPO arXiv:1707.06347, GRPO arXiv:2402.03300, REINFORCE/RLOO arXiv:2402.14740, DAPO arXiv:2503.14476, VAPO
        arXiv:2504.05118; the parts of the formula are sourced in `functional`.
    """

    def __init__(self, cfg: Any = None) -> None:
        self.cfg = cfg = parse_settings(ClippedPGLossConfig, cfg)
        self.loss_type = LossType.TOKEN_LEVEL if cfg.token_level_loss else LossType.SEQUENCE_LEVEL
        average = terms.choose_average(cfg)
        self._prev = terms.choose_prev(cfg)
        weight, bonus = cfg.positive_example_nll_weight, cfg.entropy_coeff
        self._terms: tuple[terms.Term, ...] = (
            terms.surrogate_term(cfg, average),
            terms.kl_term(cfg, average) if cfg.kl_coefficient > 0 else terms.nothing("kl_penalty"),
            terms.positive_nll_term(weight) if weight > 0 else terms.nothing("positive_nll_loss"),
            terms.entropy_term(bonus, average) if bonus > 0 else terms.entropy_report,
            terms.generation_report(cfg),
        )

    def __reduce__(self) -> tuple[type, tuple[ClippedPGLossConfig]]:
        return type(self), (self.cfg,)  # the terms are closures, made again from the settings

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        ratios = ("probs_ratio", "probs_ratio_clamped")
        return Reduction.table(
            "loss", *ratios, "kl_penalty", "clip_fraction", "num_valid_samples", "positive_nll_loss", "entropy",
            "sampling_importance_ratio", "approx_entropy", *MISMATCH_METRICS,
            *(["is_oob_ratio"] if self.cfg.truncated_importance_sampling_type is not None else []),
            minima=[f"{name}_min" for name in ratios],
            maxima=[f"{name}_max" for name in ratios],
        )  # fmt: skip

    @property
    def required_keys(self) -> tuple[str, ...]:
        cfg = self.cfg
        corrects = cfg.use_importance_sampling_correction
        conditional = {
            "prev_logprobs": not cfg.force_on_policy_ratio and (corrects or not cfg.disable_ppo_ratio),
            "generation_logprobs": corrects or (cfg.use_on_policy_kl_approximation and cfg.kl_coefficient > 0),
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
        streams = TokenStreams(data, self, next_token_logprobs)
        logprobs = streams.select("next_token_logprobs", next_token_logprobs)
        entropy = None if next_token_entropy is None else streams.select("next_token_entropy", next_token_entropy)
        tokens = terms.PolicyTokens(
            streams, logprobs, self._prev(streams, logprobs), entropy, global_valid_seqs, global_valid_toks
        )
        summands = [term(tokens) for term in self._terms]
        loss = sum(value for value, _ in summands)
        metrics = {name: metric.detach() for _, reported in summands for name, metric in reported.items()}
        return loss, metrics | {"loss": loss.detach(), "num_valid_samples": streams.sample_mask.sum()}

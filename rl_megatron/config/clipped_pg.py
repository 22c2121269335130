"""Settings of the clipped policy gradient loss: every key, its default, and the combinations that are refused."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.config.loading.settings import check_ranges, check_types, register_loss_settings

KL_TYPES = ("k1", "k2", "k3")
TRUNCATION_TYPES = ("tis", "icepop", "seq-mask-tis")
REJECTION_TYPES = ("geometric", "k3")


# For each method, the values that other keys must have, and why.
_NEEDED = {
    "use_cispo": {
        "disable_ppo_ratio": (False, "CISPO weights tokens by the ratio"),
        "force_on_policy_ratio": (False, "the ratio would always be 1, but it is CISPO's weight"),
        "sequence_level_importance_ratios": (False, "CISPO weights each token by its own ratio"),
        "ratio_clip_c": (None, "dual clip would remove gradients that CISPO keeps"),
        "token_level_loss": (True, "CISPO averages over tokens"),
    },
    "use_gmpo": {
        "use_cispo": (False, "both replace PPO's surrogate"),
        "disable_ppo_ratio": (False, "GMPO averages the ratios"),
        "force_on_policy_ratio": (False, "the ratios would always be 1"),
        "sequence_level_importance_ratios": (False, "GMPO clips each token's ratio before it averages them"),
        "ratio_clip_c": (None, "dual clip bounds single tokens"),
        "token_level_loss": (False, "GMPO averages over sequences"),
    },
    "use_sapo": {
        "use_cispo": (False, "both replace PPO's surrogate"),
        "use_gmpo": (False, "both replace PPO's surrogate"),
        "disable_ppo_ratio": (False, "SAPO's sigmoid is a function of the ratio"),
        "force_on_policy_ratio": (False, "the ratio would always be 1"),
        "sequence_level_importance_ratios": (False, "SAPO is defined for each token's own ratio"),
        "ratio_clip_c": (None, "SAPO does not clip"),
    },
    "use_clip_cov": {
        "use_cispo": (False, "both replace PPO's surrogate"),
        "use_gmpo": (False, "both replace PPO's surrogate"),
        "use_sapo": (False, "both replace PPO's surrogate"),
        "force_on_policy_ratio": (False, "the covariances need prev_logprobs"),
        "sequence_level_importance_ratios": (False, "with one ratio per sequence, no single token can be left out"),
    },
    "use_kl_cov": {
        "use_cispo": (False, "both replace PPO's surrogate"),
        "use_gmpo": (False, "both replace PPO's surrogate"),
        "use_sapo": (False, "both replace PPO's surrogate"),
        "use_clip_cov": (False, "both methods treat the same tokens, in different ways"),
        "disable_ppo_ratio": (False, "the penalty depends on the ratio"),
        "force_on_policy_ratio": (False, "the ratio would always be 1, which has no penalty"),
        "sequence_level_importance_ratios": (False, "the penalty depends on each token's own ratio"),
        "ratio_clip_c": (None, "KL-Cov does not clip"),
    },
}


@register_loss_settings("clipped_pg")
@dataclass(frozen=True)
class ClippedPGLossConfig:
    """Settings of `ClippedPGLossFn`. Keys that NeMo RL also has have its names and meanings.

    Keys of the ratio r = π/π_prev:
        disable_ppo_ratio: Use REINFORCE's −A·log π instead of the ratio. ratio_clip_* then have no effect.
        force_on_policy_ratio: Use π_prev := sg(π), so that r ≡ 1 and prev_logprobs is not read. This is exact with
            one optimizer step per rollout. It takes precedence over disable_ppo_ratio.
        sequence_level_importance_ratios: Use one ratio per sequence (GSPO). It needs token_level_loss=False. The
            importance sampling correction is then per sequence too: the product over the sequence's tokens.
        ratio_clip_min, ratio_clip_max: r is clipped to [1 − ratio_clip_min, 1 + ratio_clip_max].
        ratio_clip_c: The bound c > 1 of dual clip: if A < 0, the loss is at most −c·A. null disables dual clip.
        use_cispo: Use the clipped ratio as a constant weight on log π (CISPO).
        use_gmpo: Use the geometric mean of a sequence's clipped ratios (GMPO). log r is at most ratio_clip_max for
            A > 0, and at least −ratio_clip_min for other tokens. It needs token_level_loss=False.
        use_sapo: Use a sigmoid around r = 1 instead of the clip (SAPO). ratio_clip_* then have no effect.
        sapo_temperature_pos, sapo_temperature_neg: The temperatures τ > 0 of SAPO's sigmoid, for tokens with A > 0 and
            for others. A larger τ makes the gradient of a token vanish nearer to r = 1.

    Keys that select tokens by a covariance:
        use_clip_cov: Leave out of the loss some tokens, drawn at random from those whose covariance (A − mean A)·(log
            π_prev − mean log π_prev) is between clip_cov_min and clip_cov_max (Clip-Cov). The means are over all tokens
            of a rollout.
        clip_cov_ratio: The maximum number of tokens that are left out, as a share of all tokens; at least one token.
        clip_cov_min, clip_cov_max: The bounds of the covariance.
        use_kl_cov: Use −A·r without a clip, and add kl_cov_coef·|log r| for the tokens with the highest covariances
            (KL-Cov). ratio_clip_* then have no effect.
        kl_cov_ratio: The number of tokens that have this penalty, as a share of all tokens; at least one token.
        kl_cov_coef: The factor > 0 of the penalty.

    Keys of the average:
        token_level_loss: Average over all tokens. false: average over each sequence's tokens, then over sequences.
        fixed_sequence_length: L > 0: divide the sum over all tokens by sequences·L instead of the number of tokens. It
            is Dr. GRPO if L is the maximum completion length, and RLOO if L = 1. null: token_level_loss decides.

    Keys of the KL to the reference policy:
        reference_policy_kl_penalty: The coefficient β ≥ 0 of the KL. With 0, no reference policy is needed.
        reference_policy_kl_type: The estimator: k1, k2 or k3.
        kl_input_clamp_value: The log-ratio is clamped to ± this value before the KL is estimated. null disables it.
        kl_output_clamp_value: The KL estimate is clamped to ± this value. null disables it.
        use_kl_in_reward: The reward includes the KL, so the loss does not.
        use_on_policy_kl_approximation: Weight each token's KL by π/π_generation instead of 1, because the tokens were
            sampled from π_generation.

    Keys of the correction for the generation engine's probabilities:
        use_importance_sampling_correction: Weight each token by π_prev/π_generation. A NaN or ∞ weight becomes 0.
        truncated_importance_sampling_type: How the weights are truncated. "tis" clamps a weight to [ratio_min or 0,
            ratio]. "icepop" drops tokens whose weight is outside [ratio_min, ratio]. "seq-mask-tis" drops sequences
            whose geometric mean of weights is outside these bounds. A NaN or ∞ weight is outside all bounds and becomes
            0.
        truncated_importance_sampling_ratio: The upper bound of the weights. It is required with a type.
        truncated_importance_sampling_ratio_min: The lower bound. It is required by icepop and seq-mask-tis.

    Keys that reject sequences on which the trainer and the engine disagree. A rejected sequence has loss 0, but counts
    in the averages. These keys need generation_logprobs, but not the correction above:
        sequence_rejection_type: "geometric" rejects sequences whose geometric mean of π_prev/π_generation is outside
            [sequence_rejection_min, sequence_rejection_max]. "k3" rejects those whose mean k3 estimate of
            KL(π_generation‖π_prev) exceeds sequence_rejection_max. Both reject a sequence with a token whose ratio is
            NaN or ∞. null rejects none.
        sequence_rejection_max: The upper bound. It is required with a type.
        sequence_rejection_min: The lower bound of "geometric", which requires it.
        token_veto_threshold: Reject sequences with any token whose π_prev/π_generation is NaN, ∞ or below this number
            in (0, 1), usually 1e-4. null rejects none.

    Keys of further terms:
        positive_example_nll_weight: The weight μ ≥ 0 of VAPO's NLL, a mean over the tokens of samples with a positive
            reward in the global batch of an optimizer step.
        entropy_coeff: The coefficient ≥ 0 of the mean entropy, which is subtracted from the loss.
    """

    disable_ppo_ratio: bool = False
    token_level_loss: bool = True
    fixed_sequence_length: float | None = None
    sequence_level_importance_ratios: bool = False
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    reference_policy_kl_penalty: float = 0.01
    reference_policy_kl_type: str = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    use_on_policy_kl_approximation: bool = False
    force_on_policy_ratio: bool = False
    use_cispo: bool = False
    use_gmpo: bool = False
    use_sapo: bool = False
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    use_clip_cov: bool = False
    clip_cov_ratio: float = 0.0002
    clip_cov_min: float = 1.0
    clip_cov_max: float = 5.0
    use_kl_cov: bool = False
    kl_cov_ratio: float = 0.0002
    kl_cov_coef: float = 1.0
    sequence_rejection_type: str | None = None
    sequence_rejection_max: float | None = None
    sequence_rejection_min: float | None = None
    token_veto_threshold: float | None = None
    positive_example_nll_weight: float = 0.0
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        self._check_ranges()
        self._check_combinations()
        self._check_truncation()
        self._check_rejection()

    @property
    def kl_coefficient(self) -> float:
        """Return β of the loss: 0 if the reward includes the KL."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def uses_covariances(self) -> bool:
        """Return whether the loss treats the tokens selected in `covariance_mask` differently."""
        return self.use_clip_cov or self.use_kl_cov

    @property
    def truncation_type(self) -> str | None:
        """Return how importance weights are truncated: one of `TRUNCATION_TYPES`, or None if they are not truncated."""
        return self.truncated_importance_sampling_type

    def _check_ranges(self) -> None:
        check_ranges(
            self,
            at_least_zero=(
                "ratio_clip_min", "ratio_clip_max", "reference_policy_kl_penalty", "positive_example_nll_weight",
                "entropy_coeff",
            ),
            above_zero=(
                "kl_input_clamp_value", "kl_output_clamp_value", "truncated_importance_sampling_ratio",
                "fixed_sequence_length", "sapo_temperature_pos", "sapo_temperature_neg", "sequence_rejection_max",
                "clip_cov_ratio", "kl_cov_ratio", "kl_cov_coef",
            ),
        )  # fmt: skip
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1:
            raise ValueError(f"ratio_clip_c={self.ratio_clip_c} must exceed 1 (usually 3; null disables dual clip)")
        if self.reference_policy_kl_type not in KL_TYPES:
            raise ValueError(f"reference_policy_kl_type={self.reference_policy_kl_type!r} must be one of {KL_TYPES}")
        if self.truncated_importance_sampling_type not in (None, *TRUNCATION_TYPES):
            raise ValueError(
                f"truncated_importance_sampling_type={self.truncated_importance_sampling_type!r} must be one of "
                f"{TRUNCATION_TYPES} or null"
            )

        for key in ("clip_cov_ratio", "kl_cov_ratio"):
            if getattr(self, key) > 1:
                raise ValueError(f"{key}={getattr(self, key)} must be at most 1: it is a share of all tokens")
        if self.clip_cov_min >= self.clip_cov_max:
            raise ValueError(f"clip_cov_min={self.clip_cov_min} must be less than clip_cov_max={self.clip_cov_max}")

    def _check_combinations(self) -> None:
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError(
                "sequence_level_importance_ratios=True needs token_level_loss=False: GSPO averages over sequences"
            )
        if self.fixed_sequence_length is not None and not self.token_level_loss:
            raise ValueError(
                f"fixed_sequence_length={self.fixed_sequence_length} divides a sum over tokens, but token_level_loss="
                "False averages over sequences; set token_level_loss=True or fixed_sequence_length=null"
            )
        for method, needed in _NEEDED.items():
            for key, (value, reason) in needed.items() if getattr(self, method) else ():
                if getattr(self, key) != value:
                    raise ValueError(f"{method}=True excludes {key}={getattr(self, key)}: {reason}; set {key}={value}")

    @property
    def rejects_sequences(self) -> bool:
        """Return whether sequences on which the trainer and the engine disagree are rejected."""
        return self.sequence_rejection_type is not None or self.token_veto_threshold is not None

    def _check_rejection(self) -> None:
        veto = self.token_veto_threshold
        if veto is not None and not 0 < veto < 1:
            raise ValueError(
                f"token_veto_threshold={veto} must lie between 0 and 1, because π_prev/π_generation is 1 if the "
                "trainer and the engine agree; use 1e-4, or null for no veto"
            )
        kind, low, high = self.sequence_rejection_type, self.sequence_rejection_min, self.sequence_rejection_max
        if kind is None:
            if high is not None or low is not None:
                raise ValueError(
                    "sequence_rejection_max or sequence_rejection_min is set, but sequence_rejection_type is null; "
                    f"set the type to one of {REJECTION_TYPES} or the bounds to null"
                )
            return
        if kind not in REJECTION_TYPES:
            raise ValueError(f"sequence_rejection_type={kind!r} must be one of {REJECTION_TYPES} or null")
        if high is None:
            raise ValueError(f"sequence_rejection_type={kind!r} needs sequence_rejection_max, the upper bound")
        if (low is None) == (kind == "geometric"):
            rule = "needs a lower bound; set it" if low is None else "has no lower bound; set it to null"
            raise ValueError(f"sequence_rejection_min={low}: sequence_rejection_type={kind!r} {rule}")
        if low is not None and not 0 <= low <= high:
            raise ValueError(f"sequence_rejection_min={low} must lie between 0 and sequence_rejection_max={high}")

    def _check_truncation(self) -> None:
        kind = self.truncation_type
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        if kind is None:
            if high is not None or low is not None:
                raise ValueError(
                    "truncated_importance_sampling_ratio(_min) is set, but truncated_importance_sampling_type is null; "
                    f"set the type to one of {TRUNCATION_TYPES} ('tis' clamps the weights) or the bounds to null"
                )
            return
        setting = f"truncated_importance_sampling_type={kind!r}"
        if not self.use_importance_sampling_correction:
            raise ValueError(
                f"{setting} needs the correction that it truncates; set use_importance_sampling_correction=True"
            )
        if high is None:
            raise ValueError(f"{setting} needs truncated_importance_sampling_ratio, the upper bound")
        if low is None and kind != "tis":
            raise ValueError(f"{setting} needs truncated_importance_sampling_ratio_min, the lower bound")
        if low is not None and not 0 <= low <= high:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min={low} must lie between 0 and "
                f"truncated_importance_sampling_ratio={high}"
            )
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            raise ValueError(
                f"{setting} needs one weight per token, which excludes sequence_level_importance_ratios=True; use "
                "'tis' or 'icepop' with GSPO"
            )

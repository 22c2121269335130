"""Settings of the clipped policy gradient loss: every key, its default, and which choices exclude each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, TypedDict

from torch import Tensor

from rl_megatron.losses.settings import check_ranges, check_types

KL_TYPES = ("k1", "k2", "k3")
TRUNCATION_TYPES = ("tis", "icepop", "seq-mask-tis")


class ClippedPGLossDataDict(TypedDict):
    """The batch. Streams are [B, S], aligned with input_ids; their first column is not used.

    prev_logprobs is not needed with force_on_policy_ratio, nor by REINFORCE without a correction (its metrics against
    the generation engine need it); generation_logprobs only for the importance sampling
    correction, the on-policy KL approximation and the generation metrics; reference_policy_logprobs only with a KL
    penalty in the loss; rewards [B] only with positive_example_nll_weight. temperature (a number, [B] or [B, S])
    divides the logits in the logits form.
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
    temperature: NotRequired[Tensor]


@dataclass(frozen=True)
class ClippedPGLossConfig:
    """Key names and meanings follow NeMo RL; `entropy_coeff` and `fixed_sequence_length` are added.

    Ratio r = π/π_prev:
        disable_ppo_ratio: REINFORCE, −A·log π; all ratio_clip_* are then without effect (log π ≤ 0 < c).
        force_on_policy_ratio: π_prev := sg(π), so r ≡ 1 and prev_logprobs is not read; one update per rollout. Goes
            before disable_ppo_ratio.
        sequence_level_importance_ratios: GSPO, one ratio per sequence; needs token_level_loss=False. The importance
            sampling correction is then per sequence as well (the product over its tokens).
        ratio_clip_min, ratio_clip_max: r is clipped to [1 − ratio_clip_min, 1 + ratio_clip_max].
        ratio_clip_c: dual clip, c > 1: where A < 0 the loss is at most −c·A; null: no such ceiling.
        use_cispo: the clipped ratio as a constant weight on log π.
    Average:
        token_level_loss: over all tokens; False: over each sequence's tokens, then over sequences.
        fixed_sequence_length: L > 0: the sum over all tokens is divided by sequences·L, whatever the number of tokens.
            Dr. GRPO with L the longest completion allowed, RLOO's sum over a sequence's tokens with L = 1; null: not.
    KL to the reference policy:
        reference_policy_kl_penalty: β ≥ 0; with 0 no reference policy is needed.
        reference_policy_kl_type: the estimator: k1, k2 or k3.
        kl_input_clamp_value: the log-ratio is clamped to ± this before it is estimated from; null: it is not.
        kl_output_clamp_value: the estimate is clamped to ± this; null: it is not.
        use_kl_in_reward: the reward carries the KL, so the loss does not.
        use_on_policy_kl_approximation: weights the KL by π/π_generation rather than by 1.
    Generation engine's probabilities against the trainer's:
        use_importance_sampling_correction: weights each token by π_prev/π_generation, NaN and ∞ counting as 0.
        truncated_importance_sampling_type: "tis" clamps that weight to [ratio_min or 0, ratio]; "icepop" drops tokens,
            "seq-mask-tis" drops sequences (by the geometric mean) outside [ratio_min, ratio].
        truncated_importance_sampling_ratio: the upper bound; needed with a type.
        truncated_importance_sampling_ratio_min: the lower bound; needed by icepop and seq-mask-tis.
    Further terms:
        positive_example_nll_weight: μ ≥ 0, VAPO's NLL on tokens of samples with a positive reward.
        entropy_coeff: ≥ 0, times the mean entropy, subtracted.
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
    positive_example_nll_weight: float = 0.0
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        self._check_ranges()
        self._check_combinations()
        self._check_truncation()

    @property
    def kl_coefficient(self) -> float:
        """β of the loss: 0 if the reward carries the KL."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def truncation_type(self) -> str | None:
        """How importance weights are truncated: one of `TRUNCATION_TYPES`, or None if they are not."""
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
                "fixed_sequence_length",
            ),
        )  # fmt: skip
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1:
            raise ValueError(f"ratio_clip_c={self.ratio_clip_c} must exceed 1 (usually 3; null switches dual clip off)")
        if self.reference_policy_kl_type not in KL_TYPES:
            raise ValueError(f"reference_policy_kl_type={self.reference_policy_kl_type!r} is none of {KL_TYPES}")
        if self.truncated_importance_sampling_type not in (None, *TRUNCATION_TYPES):
            raise ValueError(
                f"truncated_importance_sampling_type={self.truncated_importance_sampling_type!r} is none of "
                f"{TRUNCATION_TYPES} or null"
            )

    def _check_combinations(self) -> None:
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError(
                "sequence_level_importance_ratios=True needs token_level_loss=False: GSPO averages over sequences"
            )
        if self.fixed_sequence_length is not None and not self.token_level_loss:
            raise ValueError(
                f"fixed_sequence_length={self.fixed_sequence_length} divides a sum over tokens, and token_level_loss="
                "False averages over sequences; set token_level_loss=True or fixed_sequence_length=null"
            )
        if not self.use_cispo:
            return
        needed = {
            "disable_ppo_ratio": (False, "CISPO weighs tokens by the ratio"),
            "force_on_policy_ratio": (False, "a ratio of 1 leaves CISPO no weight"),
            "sequence_level_importance_ratios": (False, "CISPO weighs each token"),
            "ratio_clip_c": (None, "dual clip would undo CISPO's gradient"),
            "token_level_loss": (True, "CISPO averages over tokens"),
        }
        for key, (value, reason) in needed.items():
            if getattr(self, key) != value:
                raise ValueError(f"use_cispo=True excludes {key}={getattr(self, key)}: {reason}; set {key}={value}")

    def _check_truncation(self) -> None:
        kind = self.truncation_type
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        if kind is None:
            if high is not None or low is not None:
                raise ValueError(
                    "truncated_importance_sampling_ratio(_min) is set, but truncated_importance_sampling_type is null; "
                    f"set the type to one of {TRUNCATION_TYPES}, 'tis' being the plain clamp"
                )
            return
        where = f"truncated_importance_sampling_type={kind!r}"
        if not self.use_importance_sampling_correction:
            raise ValueError(f"{where} truncates a correction that is off; set use_importance_sampling_correction=True")
        if high is None:
            raise ValueError(f"{where} needs truncated_importance_sampling_ratio, the upper bound")
        if low is None and kind != "tis":
            raise ValueError(f"{where} needs truncated_importance_sampling_ratio_min, the lower bound")
        if low is not None and not 0 <= low <= high:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min={low} must lie between 0 and "
                f"truncated_importance_sampling_ratio={high}"
            )
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            raise ValueError(
                f"{where} keeps weights per token and excludes sequence_level_importance_ratios=True; use 'tis' or "
                "'icepop' with GSPO"
            )

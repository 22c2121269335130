"""The settings of the package's losses, and the check of a loss section. The formulas are in rl_megatron/losses.

This module does not import torch, so that a mistake in a loss section is reported before torch is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_megatron.config.clipped_pg import ClippedPGLossConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.import_strings import is_import_string, load_object
from rl_megatron.config.loading.settings import (
    LOSS_SETTINGS,
    LOSSES,
    check_ranges,
    check_types,
    parse_settings,
    register_loss_settings,
)
from rl_megatron.config.recipes import suggest_method

__all__ = [
    "LOSS_SETTINGS",
    "CPOLossConfig",
    "ClippedPGLossConfig",
    "DPOLossConfig",
    "DistillationLossConfig",
    "DraftCrossEntropyLossConfig",
    "FullDistillationLossConfig",
    "IPOLossConfig",
    "KTOLossConfig",
    "MSEValueLossConfig",
    "NLLLossConfig",
    "ORPOLossConfig",
    "PreferenceLossConfig",
    "SimPOLossConfig",
    "check_loss_settings",
    "check_own_loss",
]
DISTILLATION_KL_TYPES = ("forward", "reverse", "mixed", "jensen_shannon")


def check_loss_settings(section: Mapping[str, Any], where: str = "loss") -> None:
    """Check the name of a loss section and, for a loss of the package, its settings."""
    name = section.get("name")
    if name is None or is_import_string(name):
        return
    if name not in LOSS_SETTINGS:
        if name not in LOSSES:
            names = {*LOSSES, *LOSS_SETTINGS}
            raise ConfigError(f"{where}.name={name!r}: there is no loss {name!r}{suggest_method(str(name), names)}")
        return
    try:
        parse_settings(LOSS_SETTINGS[name], {key: value for key, value in section.items() if key != "name"})
    except (KeyError, TypeError, ValueError) as error:
        message = str(error.args[0] if error.args else error)
        if isinstance(error, KeyError) and "did you mean" not in message:
            message += f"; set loss={name} instead of {where}.name={name} to replace the keys too"
        raise ConfigError(f"{where}: {message}") from error


def check_own_loss(section: Mapping[str, Any]) -> None:
    """Import the loss if its name is an import string; its file's own imports run too."""
    if is_import_string(section.get("name")):
        load_object(section["name"], "loss.name")


@register_loss_settings("nll")
@dataclass(frozen=True)
class NLLLossConfig:
    """Settings of `NLLLoss`, which has none."""


@register_loss_settings("preference")
@dataclass(frozen=True)
class PreferenceLossConfig:
    """Settings of `PreferenceLoss`.

    Attributes:
        beta: The factor β > 0 of the difference of rewards.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(self, above_zero=("beta",))


@register_loss_settings("dpo")
@dataclass(frozen=True)
class DPOLossConfig:
    """Settings of `DPOLossFn`. Names follow NeMo RL.

    Attributes:
        reference_policy_kl_penalty: The factor β ≥ 0 of the difference of rewards. A larger β keeps π closer to π_ref.
            With 0 the preference loss is the constant log 2.
        preference_loss_weight, sft_loss_weight: The weights w_p ≥ 0 and w_s ≥ 0. One of them must be above 0.
        preference_average_log_probs: Whether rewards are means over a sequence's tokens instead of sums.
        sft_average_log_probs: Whether the SFT loss of a sequence is the mean over its tokens instead of the sum.
    """

    reference_policy_kl_penalty: float = 0.05
    preference_loss_weight: float = 1.0
    sft_loss_weight: float = 0.0
    preference_average_log_probs: bool = False
    sft_average_log_probs: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(
            self,
            at_least_zero=("reference_policy_kl_penalty", "preference_loss_weight", "sft_loss_weight"),
        )
        if self.preference_loss_weight == 0 and self.sft_loss_weight == 0:
            raise ValueError(
                f"preference_loss_weight={self.preference_loss_weight} and sft_loss_weight={self.sft_loss_weight} "
                "make the loss 0; set one above 0"
            )


@register_loss_settings("ipo")
@dataclass(frozen=True)
class IPOLossConfig:
    """Settings of `IPOLossFn`.

    Attributes:
        tau: τ > 0. The target margin is 1/(2τ), so a larger τ keeps the policy closer to the reference.
        preference_average_log_probs: Whether rewards are means over a sequence's tokens (as in TRL's IPO) instead of
            sums (as in the paper).
    """

    tau: float = 0.1
    preference_average_log_probs: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(self, above_zero=("tau",))


@register_loss_settings("kto")
@dataclass(frozen=True)
class KTOLossConfig:
    """Settings of `KTOLossFn`. Names follow TRL.

    Attributes:
        beta: The factor β > 0 of the distance to the reference point. A larger β keeps π closer to π_ref.
        desirable_weight, undesirable_weight: The weights λ_D ≥ 0 and λ_U ≥ 0 of desirable and undesirable answers. One
            of them must be above 0. If the data have more answers of one label, that label needs a smaller weight.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(self, above_zero=("beta",), at_least_zero=("desirable_weight", "undesirable_weight"))
        if self.desirable_weight == 0 and self.undesirable_weight == 0:
            raise ValueError(
                f"desirable_weight={self.desirable_weight} and undesirable_weight={self.undesirable_weight} make the "
                "loss 0; set one above 0"
            )


@register_loss_settings("simpo")
@dataclass(frozen=True)
class SimPOLossConfig:
    """Settings of `SimPOLossFn`.

    Attributes:
        beta: The factor β > 0 of the difference of mean logprobs.
        gamma: The margin γ ≥ 0 that β times this difference should exceed. It is usually half of β.
        sft_loss_weight: The weight w_s ≥ 0 of the SFT loss, the chosen answer's −log π per token, averaged over pairs.
    """

    beta: float = 2.0
    gamma: float = 1.0
    sft_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(self, above_zero=("beta",), at_least_zero=("gamma", "sft_loss_weight"))


@register_loss_settings("cpo")
@dataclass(frozen=True)
class CPOLossConfig:
    """Settings of `CPOLossFn`.

    Attributes:
        beta: The factor β > 0 of the difference of logprobs.
        sft_loss_weight: The weight w_s ≥ 0 of the SFT loss, the chosen answer's −log π, averaged over pairs.
        sft_average_log_probs: Whether the SFT loss of a sequence is the mean over its tokens instead of the sum.
    """

    beta: float = 0.1
    sft_loss_weight: float = 1.0
    sft_average_log_probs: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(self, above_zero=("beta",), at_least_zero=("sft_loss_weight",))


@register_loss_settings("orpo")
@dataclass(frozen=True)
class ORPOLossConfig:
    """Settings of `ORPOLossFn`.

    Attributes:
        beta: The weight λ > 0 of the odds-ratio loss. The SFT loss has the weight 1.
    """

    beta: float = 0.1

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(self, above_zero=("beta",))


@register_loss_settings("mse_value")
@dataclass(frozen=True)
class MSEValueLossConfig:
    """Settings of `MSEValueLoss`.

    Attributes:
        scale: The factor > 0 of the loss.
        cliprange: c > 0. The squared error is also computed with the value clipped to data["values"] ± c, and the
            larger of the two is used. null disables the clip.
    """

    scale: float = 1.0
    cliprange: float | None = None

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(self, above_zero=("scale", "cliprange"))


@register_loss_settings("full_distillation")
@dataclass(frozen=True)
class FullDistillationLossConfig:
    """Settings of `FullDistillationLossFn`.

    Attributes:
        kl_type: "forward" is KL(teacher‖student), which penalises a low probability of the teacher's likely tokens.
            "reverse" is KL(student‖teacher), which penalises a high probability of the teacher's unlikely tokens.
            "mixed" is the weighted sum of both. "jensen_shannon" compares teacher and student with their mixture.
        mixed_kl_weight: The weight of the forward KL in the sum, in [0, 1]. The reverse KL has the rest.
        jsd_beta: The teacher's weight β in the mixture of jensen_shannon, in (0, 1).
        nll_weight: The weight in [0, 1) of the negative log-likelihood of the data's tokens.
    """

    kl_type: str = "mixed"
    mixed_kl_weight: float = 0.5
    jsd_beta: float = 0.5
    nll_weight: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if self.kl_type not in DISTILLATION_KL_TYPES:
            raise ValueError(f"kl_type={self.kl_type!r} must be one of {DISTILLATION_KL_TYPES}")
        if not 0 <= self.mixed_kl_weight <= 1:
            raise ValueError(
                f"mixed_kl_weight={self.mixed_kl_weight} must lie in [0, 1]: it is the weight of the forward KL, and "
                "the reverse KL has the rest"
            )
        if not 0 < self.jsd_beta < 1:
            raise ValueError(
                f"jsd_beta={self.jsd_beta} must lie in (0, 1): it is the teacher's weight in the mixture; "
                "instead of 0 use kl_type=forward, and instead of 1 kl_type=reverse, as TRL does"
            )
        if not 0 <= self.nll_weight < 1:
            raise ValueError(
                f"nll_weight={self.nll_weight} must lie in [0, 1): it is the weight of the data's −log p, and the "
                "divergence has the rest; to train without a divergence, choose an algorithm with loss.name=nll"
            )


@register_loss_settings("distillation")
@dataclass(frozen=True)
class DistillationLossConfig(FullDistillationLossConfig):
    """Settings of `DistillationLossFn`. Names follow NeMo RL.

    Attributes:
        kl_type: "forward" is KL(teacher‖student), "reverse" is KL(student‖teacher), "mixed" is the weighted sum of
            both, and "jensen_shannon" compares teacher and student with their mixture.
        mixed_kl_weight: The weight of the forward KL in the sum, in [0, 1]. The reverse KL has the rest.
        jsd_beta: The teacher's weight β in the mixture of jensen_shannon, in (0, 1).
        nll_weight: The weight in [0, 1) of the negative log-likelihood of the data's tokens.
        zero_outside_topk: true: the student keeps its probabilities over the whole vocabulary, and the teacher's are 0
            outside its top-k. false: both are renormalised over the teacher's top-k.
    """

    zero_outside_topk: bool = False


@register_loss_settings("draft_cross_entropy")
@dataclass(frozen=True)
class DraftCrossEntropyLossConfig:
    """Settings of `DraftCrossEntropyLossFn`, which has none."""

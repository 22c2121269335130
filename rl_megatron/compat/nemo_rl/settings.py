"""NeMo RL's loss settings: its defaults, its rules, and settings as attributes of a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from rl_megatron import losses
from rl_megatron.compat.nemo_rl.errors import RuleError, require, rule_errors
from rl_megatron.config.clipped_pg import TRUNCATION_TYPES
from rl_megatron.config.loading.settings import check_types
from rl_megatron.config.losses import DISTILLATION_KL_TYPES

LossClass = TypeVar("LossClass", bound=type)


class Setting:
    """A setting as an attribute of a loss. Reading it reads `loss.cfg`; assigning it checks and replaces `loss.cfg`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, loss: Any, owner: type | None = None) -> Any:
        return self if loss is None else getattr(loss.cfg, self._name)

    def __set__(self, loss: Any, value: object) -> None:
        loss.cfg = replace(loss.cfg, **{self._name: value})


def settings_as_attributes(config: type, **kinds: type[Setting]) -> Callable[[LossClass], LossClass]:
    """Return a class decorator that makes every field of a config dataclass a `Setting` of the loss.

    `kinds` maps fields to subclasses of `Setting`; all other fields use `Setting`.
    """

    def add(loss: LossClass) -> LossClass:
        for field in fields(config):
            setattr(loss, field.name, kinds.get(field.name, Setting)(field.name))
        return loss

    return add


@dataclass(frozen=True)
class ClippedPGLossConfig(losses.ClippedPGLossConfig):
    """The core's settings with NeMo RL's rules. A truncation ratio without a type means "tis"."""

    def __post_init__(self) -> None:
        with rule_errors():
            check_types(self)
            self._check_rules()
            super().__post_init__()

    @property
    def truncation_type(self) -> str | None:
        """Return how importance weights are truncated: "tis" if only a ratio is set."""
        kind, bound = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        return "tis" if kind is None and bound is not None else kind

    def _check_rules(self) -> None:
        """Raise `RuleError`, with NeMo RL's messages, for the rules that NeMo RL asserts."""
        gspo, kind = self.sequence_level_importance_ratios, self.truncated_importance_sampling_type
        high, low = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        require(
            not (gspo and self.token_level_loss),
            "sequence-level importance sampling (e.g. GSPO) is mutually exclusive with token-level loss: set "
            "token_level_loss=False",
        )
        if self.use_cispo:
            for key in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios"):
                require(not getattr(self, key), f"use_cispo is incompatible with {key}")
            require(self.ratio_clip_c is None, "use_cispo is incompatible with dual clipping (ratio_clip_c)")
            require(self.token_level_loss, "use_cispo requires token_level_loss=True")
        if self.ratio_clip_c is not None:
            require(self.ratio_clip_c > 1, f"ratio_clip_c must exceed 1, got {self.ratio_clip_c}")
        if kind is None and high is None:
            return
        require(
            self.use_importance_sampling_correction,
            "truncated importance sampling is only supported when use_importance_sampling_correction is True",
        )
        require(
            kind is None or kind in TRUNCATION_TYPES,
            f"truncated_importance_sampling_type must be 'tis', 'icepop', or 'seq-mask-tis', got {kind}",
        )
        if high is None or high <= 0:
            raise RuleError(f"truncated_importance_sampling_ratio should be positive, got {high}")
        require(
            kind is not None or low is None,
            f"truncated_importance_sampling_ratio_min={low} needs a truncated_importance_sampling_type",
        )
        require(
            kind in (None, "tis") or low is not None,
            f"truncated_importance_sampling_ratio_min should be set with truncated_importance_sampling_type={kind!r}",
        )
        require(
            low is None or low <= high,
            f"truncated_importance_sampling_ratio_min={low} must be <= truncated_importance_sampling_ratio={high}",
        )
        require(
            not (kind == "seq-mask-tis" and gspo),
            "seq-mask-tis is incompatible with sequence_level_importance_ratios=True",
        )


@dataclass(frozen=True)
class DPOLossConfig(losses.DPOLossConfig):
    """The core's settings. An error about a value is also an AssertionError."""

    def __post_init__(self) -> None:
        with rule_errors():
            super().__post_init__()


@dataclass(frozen=True)
class DistillationLossConfig(losses.DistillationLossConfig):
    """The core's settings with NeMo RL's rules."""

    def __post_init__(self) -> None:
        with rule_errors():
            check_types(self)
            weight = self.mixed_kl_weight
            require(
                self.kl_type in DISTILLATION_KL_TYPES,
                f"Invalid KL type: {self.kl_type!r} must be one of {DISTILLATION_KL_TYPES}",
            )
            require(0 <= weight <= 1, f"Invalid mixed KL weight: {weight} must lie in [0, 1]")
            super().__post_init__()


@dataclass(frozen=True)
class MseValueLossConfig(losses.MSEValueLossConfig):
    """The core's settings. An error about a value is also an AssertionError."""

    def __post_init__(self) -> None:
        with rule_errors():
            super().__post_init__()

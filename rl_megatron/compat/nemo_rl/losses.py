"""NeMo RL's losses and its KL estimates: the core's formulas, with NeMo RL's settings, rules and argument names."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor

from rl_megatron import losses
from rl_megatron.compat.nemo_rl.errors import require
from rl_megatron.compat.nemo_rl.settings import (
    ClippedPGLossConfig,
    DistillationLossConfig,
    DPOLossConfig,
    MseValueLossConfig,
    Setting,
    settings_as_attributes,
)
from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.logprobs import Sharding
from rl_megatron.losses.base import token_scores
from rl_megatron.losses.calling import Call, bind
from rl_megatron.losses.contract import Reduction
from rl_megatron.losses.distillation import LOG_INFINITESIMAL
from rl_megatron.losses.functional import kl_penalty

# The keys of a recipe's `dpo` section that the trainer reads, not the loss.
_DPO_TRAINER_KEYS = frozenset(
    "max_num_epochs max_num_steps val_period val_batches val_global_batch_size val_micro_batch_size val_at_start "
    "val_at_end seed".split()
)


class MetricNormalizer(enum.Enum):
    """The global count that a metric is divided by, as in NeMo RL 0.8."""

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


class NeedsRank(losses.Loss):
    """A loss that requires vocab_parallel_rank if it gets vocab_parallel_group, like NeMo RL's losses over logits."""

    def prepare(self, call: Call) -> Call:
        """Check the rank, and return the call."""
        require(
            call.sharding.tp_group is None or call.vocab_parallel_rank is not None,
            "vocab_parallel_rank must be provided when vocab_parallel_group is provided",
        )
        return super().prepare(call)


class _PenaltyInLoss(Setting):
    """The setting for the KL penalty. Reading it gives the penalty in the loss: 0 if the reward includes the KL."""

    def __get__(self, loss: Any, owner: type | None = None) -> Any:
        return self if loss is None else loss.cfg.kl_coefficient


class _TokenLevel(Setting):
    """The setting for what the loss averages over. Assigning it also sets `loss_type`."""

    def __set__(self, loss: Any, value: object) -> None:
        super().__set__(loss, value)
        loss.loss_type = losses.LossType.TOKEN_LEVEL if value else losses.LossType.SEQUENCE_LEVEL


@settings_as_attributes(ClippedPGLossConfig, reference_policy_kl_penalty=_PenaltyInLoss, token_level_loss=_TokenLevel)
class ClippedPGLossFn(NeedsRank, losses.ClippedPGLossFn):
    """`rl_megatron.losses.ClippedPGLossFn` with NeMo RL's settings."""

    infinite_is_outside = False

    def __init__(self, cfg: object = None) -> None:
        super().__init__(parse_settings(ClippedPGLossConfig, cfg))

    @cached_property
    def metric_normalizations(self) -> dict[str, MetricNormalizer]:
        """Return which global count divides each metric, as in NeMo RL 0.8. The settings are read at the first access.

        `positive_nll_loss` is divided by a count of tokens, also in a sequence-level loss. The terms of such a loss
        have two divisors, but the result for "loss" is only SEQUENCES.
        """
        cfg, tokens, sequences = self.cfg, MetricNormalizer.TOKENS, MetricNormalizer.SEQUENCES
        of_loss = tokens if cfg.token_level_loss and cfg.fixed_sequence_length is None else sequences
        of_weights = sequences if cfg.sequence_level_importance_ratios else tokens
        others = {
            "loss": of_loss,
            "kl_penalty": of_loss,
            "sampling_importance_ratio": of_weights,
            "sampling_importance_ratio_square": of_weights,
            "is_oob_ratio": sequences if cfg.truncation_type == "seq-mask-tis" else tokens,
            "rejected_sequences": sequences,
            "vetoed_sequences": sequences,
            "num_valid_samples": MetricNormalizer.NONE,
        }
        return {
            name: others.get(name, tokens) if reduction is Reduction.SUM else MetricNormalizer.NONE
            for name, reduction in self.metric_reductions.items()
        }


class NLLLoss(NeedsRank, losses.NLLLoss):
    """`rl_megatron.losses.NLLLoss`."""


@settings_as_attributes(DPOLossConfig)
class DPOLossFn(NeedsRank, losses.DPOLossFn):
    """`rl_megatron.losses.DPOLossFn`, which also accepts a recipe's whole `dpo` section as its settings."""

    def __init__(self, cfg: object = None) -> None:
        if isinstance(cfg, Mapping):
            cfg = {key: cfg[key] for key in cfg if key not in _DPO_TRAINER_KEYS}
        super().__init__(parse_settings(DPOLossConfig, cfg))

    def prepare(self, call: Call) -> Call:
        """Check that global_valid_toks is given if there is an SFT loss, and return the call."""
        require(
            self.cfg.sft_loss_weight == 0 or call.global_valid_toks is not None,
            "global_valid_toks must be provided for SFT loss",
        )
        return super().prepare(call)

    def _dpo_loss(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (preference loss, accuracy, mean reward of chosen sequences, mean reward of rejected sequences).

        Args:
            *args: next-token logits, or next-token logprobs [B, S-1]; data; global_valid_seqs; vocab_parallel_rank;
                vocab_parallel_group; context_parallel_group.
            **named: The same arguments by name.
        """
        groups = ("vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group")
        named |= dict(zip(groups, args[3:], strict=False))
        call = self.prepare(bind(self, args[:3], {"global_valid_toks": 0} | named))
        keywords = dict(call.keywords)
        if call.output is not None:
            keywords |= self.read_output(call.output, call.data, call.sharding)
        streams = self.streams(call.data, keywords["next_token_logprobs"])
        logprobs = streams.select("next_token_logprobs", keywords["next_token_logprobs"])
        loss, metrics = self._over_log_ratios(
            streams, logprobs, call.global_valid_seqs, self.cfg.reference_policy_kl_penalty
        )
        return loss, metrics["accuracy"], metrics["rewards_chosen_mean"], metrics["rewards_rejected_mean"]

    def _preference_loss(
        self, rewards: Tensor, sample_mask: Any, global_valid_seqs: Any, *further: Any, **named: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the result of `PreferenceLoss._preference_loss`, or of `_dpo_loss` for arguments (logits, data, …)."""
        if isinstance(sample_mask, Mapping):
            return self._dpo_loss(rewards, sample_mask, global_valid_seqs, *further, **named)
        return super()._preference_loss(rewards, sample_mask, global_valid_seqs, *further, **named)


@settings_as_attributes(DistillationLossConfig)
class DistillationLossFn(NeedsRank, losses.DistillationLossFn):
    """`rl_megatron.losses.DistillationLossFn` with NeMo RL's settings."""

    log_infinitesimal = LOG_INFINITESIMAL

    def __init__(self, cfg: object = None) -> None:
        super().__init__(parse_settings(DistillationLossConfig, cfg))

    def _teacher(self, data: Mapping[str, Any], input_ids: Tensor) -> tuple[Tensor, Tensor]:
        top_k = data["teacher_topk_indices"].shape[-1] if "teacher_topk_indices" in data else None
        require(top_k != 0, f"topk must be positive, got {top_k}")
        return super()._teacher(data, input_ids)


@settings_as_attributes(MseValueLossConfig)
class MseValueLossFn(losses.MSEValueLoss):
    """`rl_megatron.losses.MSEValueLoss` on values that are already aligned with `returns`.

    NeMo RL's workers shift the value head's output before they call the loss: entry t is the value before token t.
    """

    def __init__(self, cfg: object = None) -> None:
        super().__init__(parse_settings(MseValueLossConfig, cfg))

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        """Return the values [B, S-1] of the whole batch, without those of the first tokens."""
        return {"next_token_values": token_scores(output, data, sharding, self)[:, 1:]}


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: str = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: Tensor | None = None,
) -> Tensor:
    """Return `rl_megatron.losses.kl_penalty`, with NeMo RL's argument names."""
    return kl_penalty(
        logprobs, logprobs_reference, kl_type, input_clamp_value, output_clamp_value, importance_sampling_weights
    )


def calculate_kl_penalty_joschu2020(logprobs_policy: Tensor, logprobs_reference: Tensor) -> Tensor:
    """Return the k3 estimate of the KL, without clamps."""
    return kl_penalty(logprobs_policy, logprobs_reference, "k3", input_clamp=None, output_clamp=None)

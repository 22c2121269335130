"""Negative log-likelihood for pretraining and supervised fine-tuning, with a per-sample form for preference losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import NLLLossConfig
from rl_megatron.losses.base import LogprobLoss
from rl_megatron.losses.contract import Count, LossType, Reduction
from rl_megatron.losses.functional import masked_mean, masked_sum
from rl_megatron.losses.registry import register_loss


@register_loss("nll")
class NLLLoss(LogprobLoss):
    """The negative log-likelihood, L = −Σ_t m_t·log π(y_t) / N_tokens, with N_tokens counted over the global batch.

    With `dpo_loss=True`, the loss and the metric "loss" are [B], one value per sample: L_b = −Σ_t m_bt·log π(y_bt). If
    `dpo_average_log_probs=True` too, L_b is divided by the sample's number of tokens.
    """

    loss_type = LossType.TOKEN_LEVEL
    further_positional = ("dpo_loss", "dpo_average_log_probs")

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(NLLLossConfig, cfg)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return Reduction.table("loss", "num_unmasked_tokens", "num_valid_samples")

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        next_token_logprobs: Shaped[Tensor, "batch tokens"],
        next_token_entropy: Shaped[Tensor, "batch tokens"] | None = None,
        *,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
    ) -> tuple[Float[Tensor, ""] | Float[Tensor, " batch"], dict[str, Tensor]]:
        """Return the loss (a scalar, or [B] with `dpo_loss`) and its metrics."""
        streams = self.streams(data, next_token_logprobs)
        logprobs = streams.select("next_token_logprobs", next_token_logprobs)
        if not dpo_loss:
            loss = -masked_mean(logprobs, streams.mask, global_normalization_factor=global_valid_toks)
        elif dpo_average_log_probs:
            loss = -masked_mean(logprobs, streams.mask, dim=-1)
        else:
            loss = -masked_sum(logprobs, streams.mask, dim=-1)
        return loss, {
            "loss": loss.detach(),
            "num_unmasked_tokens": streams.mask.sum(),
            "num_valid_samples": streams.sample_mask.sum(),
        }

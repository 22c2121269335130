"""Advantage-weighted regression: the likelihood of every sample, weighted by e^(advantage / temperature).

Source: Peng et al. 2019, "Advantage-Weighted Regression" (arXiv:1910.00177), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rl_megatron import (
    LogprobLoss,
    LossType,
    Metric,
    Reduction,
    declare_metrics,
    masked_max,
    masked_mean,
    parse_settings,
)

declare_metrics(
    Metric("weight", "1", "The mean weight of a token, after the limit.", "sum"),
    Metric("weight_max", "1", "The largest weight of a token, after the limit.", "max"),
    Metric("weight_limited", "1", "The share of tokens whose weight is at the limit.", "sum"),
)


@dataclass(frozen=True)
class AdvantageWeightedConfig:
    temperature: float = 1.0  # small: only the best samples count
    max_weight: float = 20.0

    def __post_init__(self) -> None:
        if self.temperature <= 0 or self.max_weight <= 0:
            raise ValueError(f"temperature={self.temperature} and max_weight={self.max_weight} must be above 0")


class AdvantageWeightedLoss(LogprobLoss):
    """L = −Σ_t m_t · w_t · log π(y_t) / N_tokens, with w_t = min(e^(A_t / temperature), max_weight)."""

    loss_type = LossType.TOKEN_LEVEL
    metric_reductions: Mapping[str, Reduction] = Reduction.table(
        "loss", "weight", "weight_limited", maxima=["weight_max"]
    )

    def __init__(self, cfg: Any = None) -> None:
        self.cfg = parse_settings(AdvantageWeightedConfig, cfg)

    @property
    def required_keys(self) -> tuple[str, ...]:
        return (*super().required_keys, "advantages")

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Any,
        global_valid_toks: Any,
        next_token_logprobs: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        streams = self.streams(data, next_token_logprobs)  # everything below is [B, S-1]
        logprobs = streams.select("next_token_logprobs", next_token_logprobs)
        weights = (streams["advantages"] / self.cfg.temperature).exp().clamp(max=self.cfg.max_weight)

        def mean(values: Tensor) -> Tensor:
            """Return this part's share of the mean over the tokens of the global batch."""
            return masked_mean(values, streams.mask, global_normalization_factor=global_valid_toks)

        loss = -mean(weights * logprobs)
        return loss, {
            "loss": loss.detach(),
            "weight": mean(weights),
            "weight_max": masked_max(weights, streams.mask),
            "weight_limited": mean((weights >= self.cfg.max_weight).to(weights)),
        }

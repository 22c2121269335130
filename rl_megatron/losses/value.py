"""The critic's loss: the squared error of the value of each prefix against the return that followed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NotRequired, TypedDict

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import MSEValueLossConfig
from rl_megatron.losses import functional as F
from rl_megatron.losses.base import ScoreLoss
from rl_megatron.losses.contract import Count, LossType, Reduction
from rl_megatron.losses.registry import register_loss


class MSEValueLossDataDict(TypedDict):
    """The batch of `MSEValueLoss`. Entry t of values and returns corresponds to token t, that is, the prefix before it.

    Attributes:
        input_ids: Token ids, [B, S].
        values: The critic's values at rollout time, [B, S]. They are needed only with cliprange.
        returns: The returns, [B, S].
        token_mask: Which tokens count, [B, S].
        sample_mask: Which samples count, [B].
    """

    input_ids: Tensor
    values: NotRequired[Tensor]
    returns: Tensor
    token_mask: Tensor
    sample_mask: Tensor


@register_loss("mse_value")
class MSEValueLoss(ScoreLoss):
    """The value loss, L = scale·½·Σ_t m_t·max( (v_t − R_t)², (clip(v_t, v_old,t ± c) − R_t)² ) / N_tokens.

    Without c (cliprange), only the first square counts.

    v_t is the value of the prefix before token t, which the model outputs at token t−1. The model's output `[:, :-1]`
    is therefore aligned with `[:, 1:]` of data["returns"] (R) and data["values"] (v_old).

    Metrics: loss, with scale; vf_clipfrac, the share of tokens whose clipped error is larger than the unclipped one;
    returns_mean, values_mean, values_min, values_max; returns_sq_mean, the mean of R², and residual_sq_mean, the mean
    of (R − v)², which give the explained variance; num_valid_samples. Means are over the global batch's tokens.

    Shapes: the model's output, `values`, is [B, S] or [B, S, 1]; with a context_parallel_group, its zigzag slice.
    `evaluate` gets these values as next_token_values [B, S-1]. Errors: see `Loss.evaluate`.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9; the clip: OpenAI baselines, ppo2/model.py.
    """

    loss_type = LossType.TOKEN_LEVEL
    output_name = "values"
    input_names = ("next_token_values",)

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(MSEValueLossConfig, cfg)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return Reduction.table(
            "loss", "vf_clipfrac", "returns_mean", "values_mean", "returns_sq_mean", "residual_sq_mean",
            "num_valid_samples", minima=["values_min"], maxima=["values_max"],
        )  # fmt: skip

    @property
    def required_keys(self) -> tuple[str, ...]:
        return (*super().required_keys, "returns", *(() if self.cfg.cliprange is None else ("values",)))

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        next_token_values: Shaped[Tensor, "batch tokens"],
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        streams = self.streams(data, next_token_values)
        values, returns = streams.select("next_token_values", next_token_values), streams["returns"]
        mean = partial(F.masked_mean, mask=streams.mask, global_normalization_factor=global_valid_toks)
        if self.cfg.cliprange is None:
            error, clipped = F.squared_error(values, returns), torch.zeros_like(values, dtype=torch.bool)
        else:
            error, clipped = F.clipped_squared_error(values, streams["values"], returns, self.cfg.cliprange)
        loss = self.cfg.scale * mean(error)
        metrics = {
            "loss": loss,
            "vf_clipfrac": mean(clipped.to(values)),
            "returns_mean": mean(returns),
            "values_mean": mean(values),
            "values_min": F.masked_min(values, streams.mask),
            "values_max": F.masked_max(values, streams.mask),
            "returns_sq_mean": mean(returns.square()),
            "residual_sq_mean": mean((returns - values).square()),
            "num_valid_samples": streams.sample_mask.sum(),
        }
        return loss, {name: metric.detach() for name, metric in metrics.items()}

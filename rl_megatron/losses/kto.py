"""KTO: a loss for single answers that are labelled desirable or undesirable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import KTOLossConfig
from rl_megatron.losses import functional as F
from rl_megatron.losses.base import LogprobLoss
from rl_megatron.losses.contract import Count, LossType, Reduction
from rl_megatron.losses.registry import register_loss


class KTOLossDataDict(TypedDict):
    """The batch of `KTOLossFn`.

    Attributes:
        input_ids: Token ids, [B, S].
        reference_policy_logprobs: log π_ref, [B, S]. Entry t corresponds to token t.
        desirable: 1 for a desirable answer and 0 for an undesirable one, [B].
        reference_point: z₀ of the global batch, repeated for every sequence, [B].
        num_desirable: The number of desirable sequences in the global batch, repeated for every sequence, [B]. Only the
            means of rewards need it.
        token_mask: Which tokens count, [B, S].
        sample_mask: Which sequences count, [B].
    """

    input_ids: Tensor
    reference_policy_logprobs: Tensor
    desirable: Tensor
    reference_point: Tensor
    num_desirable: NotRequired[Tensor]
    token_mask: Tensor
    sample_mask: Tensor


@register_loss("kto")
class KTOLossFn(LogprobLoss):
    """The KTO loss, the mean of λ·( 1 − σ(β·v) ) over sequences.

        v = r − z₀ and λ = λ_D for a desirable answer,  v = z₀ − r and λ = λ_U for an undesirable one
        r = Σ_t m_t·( log π(y_t) − log π_ref(y_t) ),  z₀ ≥ 0 an estimate of KL(π‖π_ref) without a gradient

    z₀ is data["reference_point"], computed by `algorithms/kto.py`. It is the same number for the whole global batch, so
    that the loss does not depend on microbatches. A sequence counts if its sample_mask is not 0 and it has a token with
    token_mask ≠ 0.

    Metrics: loss; reference_point; num_valid_samples; rewards_desirable_mean and rewards_undesirable_mean, the means of
    r over the answers with this label. They do not include β, and are 0 if no answer has the label.

    TRL's KTOTrainer computes the same loss with loss_type "kto". TRL's rewards include β, and its z₀ is estimated from
    one microbatch per rank, averaged over ranks.

    Shapes and errors: see `Loss.evaluate`.

    Source: Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic Optimization" (arXiv:2402.01306), eq. 7.
    """

    loss_type = LossType.SEQUENCE_LEVEL

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(KTOLossConfig, cfg)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return Reduction.table(
            "loss", "reference_point", "rewards_desirable_mean", "rewards_undesirable_mean", "num_valid_samples"
        )

    @property
    def required_keys(self) -> tuple[str, ...]:
        return (*super().required_keys, "reference_policy_logprobs", "desirable", "reference_point")

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        next_token_logprobs: Shaped[Tensor, "batch tokens"],
        next_token_entropy: Shaped[Tensor, "batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Return the loss and its metrics from next-token logprobs.

        Raises:
            TypeError: global_valid_seqs is None.
        """
        if global_valid_seqs is None:
            raise TypeError(f"{self.display_name} needs global_valid_seqs, but got None")
        cfg, streams = self.cfg, self.streams(data, next_token_logprobs)
        log_ratios = streams.select("next_token_logprobs", next_token_logprobs) - streams["reference_policy_logprobs"]
        rewards = F.masked_sum(log_ratios, streams.token_mask, dim=-1)
        weights = streams.sample_mask * (streams.mask != 0).any(dim=1).to(rewards)
        desirable = streams.per_sample("desirable")
        point = streams.per_sample("reference_point").detach()

        losses = desirable * cfg.desirable_weight * torch.sigmoid(cfg.beta * (point - rewards))
        losses = losses + (1 - desirable) * cfg.undesirable_weight * torch.sigmoid(cfg.beta * (rewards - point))
        loss = F.masked_mean(losses, weights, global_normalization_factor=global_valid_seqs)
        means = {}
        if "num_desirable" in streams:
            num_desirable = streams.per_sample("num_desirable")
            labels = {
                "rewards_desirable_mean": (desirable, num_desirable),
                "rewards_undesirable_mean": (1 - desirable, global_valid_seqs - num_desirable),
            }
            means = {
                name: F.masked_sum(rewards / count.clamp(min=1), weights * chosen).detach()
                for name, (chosen, count) in labels.items()
            }
        return loss, means | {
            "loss": loss.detach(),
            "reference_point": F.masked_mean(point, streams.sample_mask, global_normalization_factor=global_valid_seqs),
            "num_valid_samples": streams.sample_mask.sum(),
        }

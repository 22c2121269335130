"""Identity preference optimization: DPO's rewards, with a squared loss that has a target margin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import IPOLossConfig
from rl_megatron.losses import functional as F
from rl_megatron.losses.contract import Count
from rl_megatron.losses.dpo import ReferencePreferenceLoss
from rl_megatron.losses.registry import register_loss


@register_loss("ipo")
class IPOLossFn(ReferencePreferenceLoss):
    """The IPO loss, L = Σ_pairs w·( r_chosen − r_rejected − 1/(2τ) )² / (N_seqs / 2), with r log-ratios to a reference.

    **data["reference_policy_logprobs"] is rolled by −1**: see `ReferencePreferenceLoss`. For pairs, metrics and errors,
    see `PreferenceLoss`. TRL's DPOTrainer computes the same with loss_type "ipo", τ as its beta, and
    preference_average_log_probs=True here.

    Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17.
    """

    cfg: IPOLossConfig

    def __init__(self, cfg: Any = None) -> None:
        self.cfg = parse_settings(IPOLossConfig, cfg)

    def _pair_loss(self, margin: Tensor) -> Tensor:
        return F.identity_preference(margin, self.cfg.tau)

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        next_token_logprobs: Shaped[Tensor, "batch tokens"],
        next_token_entropy: Shaped[Tensor, "batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        """Return the loss and its metrics from next-token logprobs."""
        streams = self.streams(data, next_token_logprobs)
        logprobs = streams.select("next_token_logprobs", next_token_logprobs)
        loss, metrics = self._over_log_ratios(streams, logprobs, global_valid_seqs, beta=1.0)
        return loss, {"loss": loss.detach()} | metrics

"""DPO and IPO: preference losses whose rewards are log-ratios of a policy to its reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import DPOLossConfig, IPOLossConfig
from rl_megatron.losses import functional as F
from rl_megatron.losses.contract import Count, Reduction
from rl_megatron.losses.preference import PAIR_METRICS_WITH_SFT, LogprobPreferenceLoss
from rl_megatron.losses.registry import register_loss
from rl_megatron.losses.streams import TokenStreams


class DPOLossDataDict(TypedDict):
    """The batch of `DPOLossFn` and `IPOLossFn`. Chosen and rejected sequences alternate: see `PreferenceLoss`.

    Attributes:
        input_ids: Token ids, [B, S].
        reference_policy_logprobs: log π_ref, [B, S]. Entry t corresponds to token t+1, unlike in other streams: see
            `ReferencePreferenceLoss`.
        token_mask: Which tokens count, [B, S].
        sample_mask: Which sequences count, [B].
    """

    input_ids: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class ReferencePreferenceLoss(LogprobPreferenceLoss):
    """A preference loss whose rewards are log-ratios to a reference policy.

        r_b = Σ_t m_bt·( log π(y_bt) − log π_ref(y_bt) ),  divided by Σ_t m_bt with preference_average_log_probs

    **data["reference_policy_logprobs"] [B, S] is rolled by −1**, as in NeMo RL. Its entry t corresponds to token t+1,
    so that `[:, :-1]` is aligned with the next-token logprobs. The last column is not read. For logprobs that are
    aligned with input_ids, use `torch.roll(logprobs, -1, dims=-1)`.
    """

    next_token_keys = frozenset({"reference_policy_logprobs"})

    @property
    def required_keys(self) -> tuple[str, ...]:
        return (*super().required_keys, "reference_policy_logprobs")

    @property
    def averages_logprobs(self) -> bool:
        return self.cfg.preference_average_log_probs

    def _over_log_ratios(
        self, streams: TokenStreams, logprobs: Tensor, global_valid_seqs: Count, beta: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, all metrics except "loss") for rewards that are sums or means of log-ratios."""
        log_ratios = logprobs - streams["reference_policy_logprobs"]
        rewards = self._reduce_sequences(streams, log_ratios, self.averages_logprobs)
        return self._over_rewards(streams, rewards, global_valid_seqs, beta)


@register_loss("dpo")
class DPOLossFn(ReferencePreferenceLoss):
    """The DPO loss, L = w_p·L_pref + w_s·L_sft, by default with w_p = 1 and w_s = 0.

        L_pref = −Σ_pairs w·log σ( β·(r_chosen − r_rejected) ) / (N_seqs / 2),  r = log-ratios to the reference
        L_sft  = −Σ_chosen s·Σ_t m_t·log π(y_t) / (N_seqs / 2),  s = sample_mask

    With sft_average_log_probs, the sum Σ_t in L_sft becomes a mean over the tokens that count.

    **data["reference_policy_logprobs"] is rolled by −1**: see `ReferencePreferenceLoss`. Pairs: see `PreferenceLoss`.

    Metrics: loss, preference_loss and sft_loss (both without their weights; sft_loss is 0 if w_s is 0), and the metrics
    of `PreferenceLoss`. Rewards do not include β.

    TRL's DPOTrainer computes the same L_pref with loss_type "sigmoid", or "sigmoid_norm" for
    preference_average_log_probs. TRL's rewards include β. TRL's "sft" is a mean over the tokens of chosen sequences,
    whereas L_sft is a mean over pairs.

    Shapes and errors: see `Loss.evaluate`. An odd number of sequences is a ValueError.

    Source: Rafailov et al. 2023, "Direct Preference Optimization" (arXiv:2305.18290), eq. 7. With the SFT loss: Pang et
    al. 2024, "Iterative Reasoning Preference Optimization" (arXiv:2404.19733).
    """

    cfg: DPOLossConfig

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(DPOLossConfig, cfg)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return PAIR_METRICS_WITH_SFT

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        next_token_logprobs: Shaped[Tensor, "batch tokens"],
        next_token_entropy: Shaped[Tensor, "batch tokens"] | None = None,
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        cfg, streams = self.cfg, self.streams(data, next_token_logprobs)
        logprobs = streams.select("next_token_logprobs", next_token_logprobs)
        preference_loss, metrics = self._over_log_ratios(
            streams, logprobs, global_valid_seqs, cfg.reference_policy_kl_penalty
        )
        weights = cfg.preference_loss_weight, cfg.sft_loss_weight
        loss, losses = self._with_sft(
            streams, logprobs, global_valid_seqs, preference_loss, weights, cfg.sft_average_log_probs
        )
        return loss, losses | metrics


@register_loss("ipo")
class IPOLossFn(ReferencePreferenceLoss):
    """The IPO loss, L = Σ_pairs w·( r_chosen − r_rejected − 1/(2τ) )² / (N_seqs / 2), r = log-ratios to a reference.

    **data["reference_policy_logprobs"] is rolled by −1**: see `ReferencePreferenceLoss`. For pairs, metrics and errors,
    see `PreferenceLoss`. With preference_average_log_probs=True, the loss equals that of TRL's DPOTrainer with
    loss_type "ipo" and beta=τ.

    Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17.
    """

    cfg: IPOLossConfig

    def __init__(self, cfg: object = None) -> None:
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
        streams = self.streams(data, next_token_logprobs)
        logprobs = streams.select("next_token_logprobs", next_token_logprobs)
        loss, metrics = self._over_log_ratios(streams, logprobs, global_valid_seqs, beta=1.0)
        return loss, {"loss": loss.detach()} | metrics

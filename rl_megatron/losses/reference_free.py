"""Preference losses without a reference policy: SimPO, CPO and ORPO. Their rewards come from the policy alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import CPOLossConfig, ORPOLossConfig, SimPOLossConfig
from rl_megatron.losses import functional as F
from rl_megatron.losses.contract import Count, Reduction
from rl_megatron.losses.preference import PAIR_METRICS_WITH_SFT, LogprobPreferenceLoss
from rl_megatron.losses.registry import register_loss


class ReferenceFreeLoss(LogprobPreferenceLoss):
    """A loss w_p·L_pref + w_s·L_sft whose rewards are a function of an answer's log-probability.

    Metrics: loss, preference_loss and sft_loss (both without their weights; sft_loss is 0 if w_s is 0), and the metrics
    of `PreferenceLoss`. Rewards do not include β. Pairs, shapes and errors: see `PreferenceLoss`.
    """

    beta: float
    preference_weight: float = 1.0
    sft_weight: float
    sft_average: bool = True

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return PAIR_METRICS_WITH_SFT

    def _rewards(self, answers: Tensor) -> Tensor:
        """Return the rewards, given the sum or mean (`averages_logprobs`) of log π over each answer. Both are [B]."""
        return answers

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
        rewards = self._rewards(self._reduce_sequences(streams, logprobs, self.averages_logprobs))
        preference_loss, metrics = self._over_rewards(streams, rewards, global_valid_seqs, self.beta)
        weights = self.preference_weight, self.sft_weight
        loss, losses = self._with_sft(streams, logprobs, global_valid_seqs, preference_loss, weights, self.sft_average)
        return loss, losses | metrics


@register_loss("simpo")
class SimPOLossFn(ReferenceFreeLoss):
    """The SimPO loss, −Σ_pairs w·log σ( β·(r_chosen − r_rejected) − γ ) / (N_seqs / 2), plus w_s·L_sft.

    r is the mean of log π over the tokens of an answer, and γ is the margin by which the chosen answer should lead.
    With w_s > 0 it is CPO-SimPO. TRL's CPOTrainer computes the same preference loss with loss_type "simpo" and
    simpo_gamma=γ.

    Source: Meng et al. 2024, "SimPO" (arXiv:2405.14734), eq. 6.
    """

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(SimPOLossConfig, cfg)
        self.beta, self.sft_weight = self.cfg.beta, self.cfg.sft_loss_weight

    @property
    def averages_logprobs(self) -> bool:
        """Return True: an answer's reward is a mean over its tokens."""
        return True

    def _pair_loss(self, margin: Tensor) -> Tensor:
        return F.bradley_terry(margin - self.cfg.gamma)


@register_loss("cpo")
class CPOLossFn(ReferenceFreeLoss):
    """The CPO loss, −Σ_pairs w·log σ( β·(r_chosen − r_rejected) ) / (N_seqs / 2) + w_s·L_sft, with r = Σ_t m_t·log π.

    TRL's CPOTrainer computes the same preference loss with loss_type "sigmoid". TRL's NLL (factor cpo_alpha) is a mean
    over the tokens of chosen sequences, prompts included. L_sft is a mean over pairs and excludes prompts.

    Source: Xu et al. 2024, "Contrastive Preference Optimization" (arXiv:2401.08417), eq. 3 to 5.
    """

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(CPOLossConfig, cfg)
        self.beta, self.sft_weight = self.cfg.beta, self.cfg.sft_loss_weight
        self.sft_average = self.cfg.sft_average_log_probs


@register_loss("orpo")
class ORPOLossFn(ReferenceFreeLoss):
    """The ORPO loss, L = L_sft − λ·Σ_pairs w·log σ( r_chosen − r_rejected ) / (N_seqs / 2), with r = log P/(1 − P).

    P is exp of the mean of log π over the tokens of an answer, and L_sft is the mean over pairs of −log P of the chosen
    answer. TRL's ORPOTrainer computes the same odds-ratio loss, with λ as its beta. TRL's NLL is a mean over the tokens
    of chosen sequences, prompts included.

    Source: Hong et al. 2024, "ORPO" (arXiv:2403.07691), eq. 4 to 7.
    """

    beta = 1.0
    sft_weight = 1.0

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(ORPOLossConfig, cfg)
        self.preference_weight = self.cfg.beta

    @property
    def averages_logprobs(self) -> bool:
        """Return True: P is computed from the mean of log π over an answer's tokens."""
        return True

    def _rewards(self, answers: Tensor) -> Tensor:
        return F.log_odds(answers)

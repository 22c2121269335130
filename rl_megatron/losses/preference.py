"""The preference loss: pairs of a chosen and a rejected sequence, compared by reward. DPO and others derive from it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, TypedDict

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.config.loading.settings import parse_settings
from rl_megatron.config.losses import PreferenceLossConfig
from rl_megatron.data.batch import score_positions
from rl_megatron.logprobs import Sharding
from rl_megatron.losses import functional as F
from rl_megatron.losses.base import LogprobLoss, Loss, token_scores
from rl_megatron.losses.contract import Count, LossInputType, LossType, Reduction
from rl_megatron.losses.registry import register_loss
from rl_megatron.losses.streams import TokenStreams, require_real

PAIR_METRICS = Reduction.table("loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "num_valid_samples")
PAIR_METRICS_WITH_SFT: Mapping[str, Reduction] = PAIR_METRICS | Reduction.table("preference_loss", "sft_loss")


class PreferenceLossDataDict(TypedDict):
    """The batch of `PreferenceLoss`. Sequences 0, 2, 4, … are chosen, and sequences 1, 3, 5, … are rejected.

    Attributes:
        input_ids: Token ids, [B, S].
        token_mask: Which tokens count, [B, S].
        sample_mask: Which sequences count, [B].
    """

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor


@register_loss("preference")
class PreferenceLoss(Loss):
    """The Bradley-Terry loss of pairs, L = −Σ_pairs w·log σ( β·(r_chosen − r_rejected) ) / (N_seqs / 2).

    Sequences 0, 2, 4, … are chosen, and the sequence after each is its rejected one. w is the smaller sample_mask of
    the two. A pair counts only if both of its sequences have a sample_mask that is not 0 and at least one token with
    token_mask ≠ 0.

    Metrics: loss; accuracy, the share of pairs with r_chosen > r_rejected; rewards_chosen_mean and
    rewards_rejected_mean. All are means over the global batch's pairs. num_valid_samples is Σ sample_mask / 2.

    TRL's RewardTrainer computes the same loss if it uses neither margins nor center_rewards_coefficient.

    Shapes: the model's output, `rewards`, has one reward per sequence ([B] or [B, 1]) or per token ([B, S] or
    [B, S, 1]; with a context_parallel_group, its zigzag slice). If it has one per token, a sequence's reward is the one
    at its last token with token_mask ≠ 0; without such a token it is 0 and has no gradient. `evaluate` takes rewards
    [B].

    Errors: see `Loss.evaluate`. An odd number of sequences is a ValueError that names the number.

    Source: Bradley & Terry 1952; Ouyang et al. 2022, "InstructGPT" (arXiv:2203.02155), eq. 1.
    """

    cfg: Any
    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGIT
    output_name = "rewards"
    group_size = 2

    def __init__(self, cfg: object = None) -> None:
        self.cfg = parse_settings(PreferenceLossConfig, cfg)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return PAIR_METRICS

    @property
    def averages_logprobs(self) -> bool:
        """Return whether an answer's reward comes from a mean over its tokens, instead of a sum."""
        return False

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        """Return the reward of each sequence, [B].

        Raises:
            ValueError: Rewards are one per sequence, but context parallelism cuts sequences.
        """
        if sharding.cu_seqlens is None and (output.dim() == 1 or (output.dim() == 2 and output.size(1) == 1)):
            if sharding.cp_group is not None and sharding.cp_group.size() > 1:
                raise ValueError(
                    f"{self.display_name}: rewards {tuple(output.shape)} are one per sequence, but "
                    f"{sharding.cp_group.size()} context parallel ranks cut sequences; give one per token, [B, S]"
                )
            return {"rewards": output.flatten()}
        mask = self.mask(data).including_first.to(output.device)
        return {"rewards": last_score(token_scores(output, data, sharding, self), data, mask)}

    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        rewards: Shaped[Tensor, " batch"],
    ) -> tuple[Float[Tensor, ""], dict[str, Float[Tensor, ""]]]:
        mask = self.mask(data)
        if rewards.shape != mask.samples.shape:
            raise ValueError(
                f"{self.display_name}: rewards {tuple(rewards.shape)} do not fit sample_mask "
                f"{tuple(mask.samples.shape)}"
            )
        rewards = require_real(rewards, "rewards", self.display_name)
        rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
        has_tokens = (mask.including_first != 0).any(dim=1)
        loss, metrics = self._over_pairs(rewards, mask.samples, has_tokens, global_valid_seqs, self.cfg.beta)
        return loss, {"loss": loss.detach()} | metrics

    def _over_pairs(
        self, rewards: Tensor, sample_mask: Tensor, has_tokens: Tensor, global_valid_seqs: Count, beta: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, all metrics except "loss"). rewards, sample_mask and has_tokens are [B]."""
        sample_mask, has_tokens = sample_mask.to(rewards), has_tokens.to(rewards)
        loss, accuracy, chosen, rejected = self._preference_loss(
            rewards, sample_mask * has_tokens, global_valid_seqs, beta
        )
        return loss, {
            "accuracy": accuracy.detach(),
            "rewards_chosen_mean": chosen.detach(),
            "rewards_rejected_mean": rejected.detach(),
            "num_valid_samples": sample_mask.sum() / 2,
        }

    def split_output_tensor(
        self, tensor: Shaped[Tensor, " batch *more"]
    ) -> tuple[Shaped[Tensor, " pairs *more"], Shaped[Tensor, " pairs *more"]]:
        """Split a tensor [B, …] into (chosen, rejected), each [B/2, …].

        Raises:
            ValueError: B is odd.
        """
        if len(tensor) % 2:
            raise ValueError(
                f"{self.display_name}: {len(tensor)} sequences are not pairs; sequences 0, 2, … are chosen and "
                "sequences 1, 3, … rejected, so their number must be even"
            )
        return tensor[::2], tensor[1::2]

    def _preference_loss(
        self, rewards: Tensor, sample_mask: Tensor, global_valid_seqs: Count, beta: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (loss, accuracy, mean reward of chosen sequences, mean reward of rejected sequences).

        Each is a sum over this batch's pairs, divided by global_valid_seqs / 2.

        Shapes: rewards and sample_mask are [B]; results are scalars.
        """
        weights = torch.minimum(*self.split_output_tensor(sample_mask))
        # A pair does not count if one of its sequences is masked. A NaN of either sequence must not reach the gradient.
        chosen, rejected = (torch.where(weights != 0, part, 0.0) for part in self.split_output_tensor(rewards))
        mean = partial(F.masked_mean, mask=weights, global_normalization_factor=self._num_pairs(global_valid_seqs))
        losses = self._pair_loss(beta * (chosen - rejected))
        return mean(losses), mean((chosen > rejected).to(losses)), mean(chosen), mean(rejected)

    def _num_pairs(self, global_valid_seqs: Count) -> Tensor | float:
        if global_valid_seqs is None:
            raise TypeError(f"{self.display_name} needs global_valid_seqs, but got None")
        return global_valid_seqs / 2

    def _pair_loss(self, margin: Tensor) -> Tensor:
        """Return the loss of each pair from its margin, β·(r_chosen − r_rejected)."""
        return F.bradley_terry(margin)


class LogprobPreferenceLoss(LogprobLoss, PreferenceLoss):
    """A preference loss whose rewards come from next-token logprobs.

    Subclasses define the formula of the reward, and may add an SFT loss, −log π of chosen answers.
    """

    @abstractmethod
    def evaluate(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        *streams: Any,
        **keywords: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its metrics from next-token logprobs, instead of rewards."""

    def _reduce_sequences(self, streams: TokenStreams, values: Tensor, average: bool) -> Tensor:
        """Return the sum or the mean of token values over each sequence, [B, S-1] → [B]."""
        over_sequence = F.masked_mean if average else F.masked_sum
        return over_sequence(values, streams.token_mask, dim=-1)

    def _over_rewards(
        self, streams: TokenStreams, rewards: Tensor, global_valid_seqs: Count, beta: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (preference loss, all metrics of `PreferenceLoss` except "loss") from rewards [B]."""
        has_tokens = (streams.mask != 0).any(dim=1)
        return self._over_pairs(rewards, streams.sample_mask, has_tokens, global_valid_seqs, beta)

    def _with_sft(
        self,
        streams: TokenStreams,
        logprobs: Tensor,
        global_valid_seqs: Count,
        preference_loss: Tensor,
        weights: tuple[float, float],
        average: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this batch's w_p·L_pref + w_s·L_sft, and the metrics loss, preference_loss and sft_loss.

        Args:
            streams: The streams of the batch.
            logprobs: [B, S-1] log π.
            global_valid_seqs: The number of sequences that count in the global batch.
            preference_loss: L_pref.
            weights: (w_p, w_s). If w_s is 0, L_sft is not computed and counts as 0.
            average: Whether L_sft averages over the tokens of chosen sequences, instead of summing.
        """
        preference_weight, sft_weight = weights
        sft_loss = logprobs.new_zeros(())
        if sft_weight > 0:
            chosen, _ = self.split_output_tensor(-self._reduce_sequences(streams, logprobs, average))
            samples, _ = self.split_output_tensor(streams.sample_mask)
            num_pairs = self._num_pairs(global_valid_seqs)
            sft_loss = F.masked_mean(chosen, samples, global_normalization_factor=num_pairs)
        loss = preference_weight * preference_loss + sft_weight * sft_loss
        losses = {"loss": loss, "preference_loss": preference_loss, "sft_loss": sft_loss}
        return loss, {name: value.detach() for name, value in losses.items()}


def last_score(
    scores: Float[Tensor, "batch sequence"], data: Mapping[str, Any], mask: Shaped[Tensor, "batch sequence"]
) -> Float[Tensor, " batch"]:
    """Return the score of each sequence at its `score_positions`, [B, S] → [B].

    If no token of a sequence counts, its score is 0 and has no gradient.
    """
    last_scores = scores.gather(1, score_positions(data).to(scores.device)[:, None])[:, 0]
    return torch.where((mask != 0).any(dim=1), last_scores, 0.0)

"""Preferences: pairs of rows, chosen and rejected, judged by the reward of each. What DPO and IPO build on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rl_megatron.logprobs import Sharding
from rl_megatron.losses import functional as F
from rl_megatron.losses.base import Loss, token_scores
from rl_megatron.losses.contract import Count, LossInputType, LossType, Reduction
from rl_megatron.losses.registry import register_loss
from rl_megatron.losses.settings import check_ranges, check_types, parse_settings
from rl_megatron.losses.streams import real


class PreferenceLossDataDict(TypedDict):
    """The batch. Rows interleave: chosen 0, 2, 4, …, rejected 1, 3, 5, …; sample_mask [B], the rest [B, S]."""

    input_ids: Tensor
    token_mask: Tensor
    sample_mask: Tensor


@dataclass(frozen=True)
class PreferenceLossConfig:
    """beta: β > 0, the scale of a difference of rewards."""

    beta: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        check_ranges(self, above_zero=("beta",))


@register_loss("preference")
class PreferenceLoss(Loss):
    """L = −Σ_pairs w·log σ( β·(r_chosen − r_rejected) ) / (N_seqs / 2),  w = min of the two rows' sample_mask

    Rows 0, 2, 4, … are chosen and the row after each is its rejected one. A pair counts where both rows do: their
    sample_mask is not 0, and they have a token with token_mask ≠ 0.

    Metrics: loss; accuracy, the share of pairs with r_chosen > r_rejected; rewards_chosen_mean, rewards_rejected_mean,
    all over the global batch's pairs; num_valid_samples, its number of pairs, Σ sample_mask / 2.

    TRL's RewardTrainer computes the same, but for its margins and center_rewards_coefficient.

    Shapes: rewards, the model's output, one a row, [B] or [B, 1], or one a token, [B, S] or [B, S, 1] (with a
        context_parallel_group its zigzag slice), of which a row's reward is the one at its last token with
        token_mask ≠ 0; without such a token the reward is 0 and has no gradient. `evaluate` takes rewards [B].
    Raises: see `Loss.evaluate`; ValueError for an odd number of rows, naming it.
    Source: Bradley & Terry 1952; Ouyang et al. 2022, "InstructGPT" (arXiv:2203.02155), eq. 1.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGIT
    output_name = "rewards"
    group_size = 2
    metric_reductions: Mapping[str, Reduction] = Reduction.table(
        "loss", "accuracy", "rewards_chosen_mean", "rewards_rejected_mean", "num_valid_samples"
    )

    def __init__(self, cfg: Any = None) -> None:
        self.cfg = parse_settings(PreferenceLossConfig, cfg)

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        if sharding.cu_seqlens is None and (output.dim() == 1 or (output.dim() == 2 and output.size(1) == 1)):
            if sharding.cp_group is not None and sharding.cp_group.size() > 1:
                raise ValueError(
                    f"{self.display_name}: rewards {tuple(output.shape)}, one a row, cannot be cut over "
                    f"{sharding.cp_group.size()} context parallel ranks; give one a token, [B, S]"
                )
            return {"rewards": output.flatten()}
        mask = self.mask(data).including_first.to(output.device)
        return {"rewards": last_score(token_scores(output, data, sharding, self), mask)}

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
        rewards = real(rewards, "rewards", self.display_name).to(torch.promote_types(rewards.dtype, torch.float32))
        has_tokens = (mask.including_first != 0).any(dim=1)
        loss, metrics = self._over_pairs(rewards, mask.samples, has_tokens, global_valid_seqs, self.cfg.beta)
        return loss, {"loss": loss.detach()} | metrics

    def _over_pairs(
        self, rewards: Tensor, sample_mask: Tensor, has_tokens: Tensor, global_valid_seqs: Count, beta: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss, its metrics other than "loss"); rewards, sample_mask, has_tokens [B]."""
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
        """Return (chosen, rejected), each [B/2, …], of a tensor [B, …].

        Raises:
            ValueError: B is odd.
        """
        if len(tensor) % 2:
            raise ValueError(
                f"{self.display_name}: {len(tensor)} rows are not pairs; rows 0, 2, … are chosen and rows 1, 3, … "
                "rejected, so their number must be even"
            )
        return tensor[::2], tensor[1::2]

    def _preference_loss(
        self, rewards: Tensor, sample_mask: Tensor, global_valid_seqs: Count, beta: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (loss, accuracy, mean reward of chosen, of rejected sequences), each over global_valid_seqs / 2.

        Shapes: rewards, sample_mask [B]; results scalars.
        """
        weights = torch.minimum(*self.split_output_tensor(sample_mask))
        # A pair that does not count may still have a row that does: its NaN must not reach the margin's gradient.
        chosen, rejected = (torch.where(weights != 0, part, 0.0) for part in self.split_output_tensor(rewards))
        mean = partial(F.masked_mean, mask=weights, global_normalization_factor=self._num_pairs(global_valid_seqs))
        losses = self._pair_loss(beta * (chosen - rejected))
        return mean(losses), mean((chosen > rejected).to(losses)), mean(chosen), mean(rejected)

    def _num_pairs(self, global_valid_seqs: Count) -> Tensor | float:
        """Return the number of pairs in the global batch.

        Raises:
            TypeError: the number of its sequences is None.
        """
        if global_valid_seqs is None:
            raise TypeError(f"{self.display_name} needs global_valid_seqs, and got None")
        return global_valid_seqs / 2

    def _pair_loss(self, margin: Tensor) -> Tensor:
        return F.bradley_terry(margin)


def last_score(
    scores: Float[Tensor, "batch sequence"], mask: Shaped[Tensor, "batch sequence"]
) -> Float[Tensor, " batch"]:
    """Return scores[b, last t with mask[b, t] ≠ 0], [B, S] → [B]; 0, without a gradient, if there is no such t."""
    position = torch.arange(mask.size(1), device=mask.device)
    last = torch.where(mask != 0, position, -1).amax(dim=1)
    return torch.where(last >= 0, scores.gather(1, last.clamp(min=0)[:, None])[:, 0], 0.0)

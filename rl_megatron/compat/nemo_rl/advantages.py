"""NeMo RL's advantage estimators: its classes and settings, built on `rl_megatron.algorithms.advantages`.

They accept the arguments of NeMo RL 0.6, whose settings are dicts, and those of newer versions: settings objects,
`valid_mask`, `std_rewards` and named reward components (`reward/name` instead of `reward1`).

The intended differences from `nemo_rl.algorithms.advantage_estimator` are:

- Settings are strict, like those of losses, and missing keys take defaults.
- Normalised values are divided by the sample standard deviation. They are 0 at masked tokens, and if all are equal.
- The baseline of an invalid sample is the mean of the valid samples, with or without leave-one-out. Invalid samples are
  also left out of GDPO's normalisation over the batch.
- A KL penalty in the reward without `logprobs_policy` and `logprobs_reference` is an error.
- Advantages and returns of GAE are 0 at masked tokens. `length_adaptive_alpha` is not provided.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import generalized_advantages, token_rewards, whiten
from rl_megatron.compat.nemo_rl.errors import RuleError, require
from rl_megatron.compat.nemo_rl.settings import ClippedPGLossConfig
from rl_megatron.config.loading.settings import check_types, parse_settings
from rl_megatron.losses import kl_penalty

_EPSILON = 1e-6


@dataclass(frozen=True)
class AdvEstimatorConfig:
    """The section `grpo.adv_estimator` of a recipe. Each estimator reads the keys that it knows."""

    name: str = "grpo"
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = True
    reward_weights: Sequence[Any] | None = None
    minus_baseline: bool = True

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class GAEConfig:
    """The section `ppo.adv_estimator` of a recipe."""

    name: str = "gae"
    gae_lambda: float = 0.95
    gae_gamma: float = 1.0
    normalize_advantages: bool = True
    gae_lambda_value: float | None = None
    gae_lambda_policy: float | None = None
    length_adaptive_alpha: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        require(
            self.length_adaptive_alpha == 0,
            f"length_adaptive_alpha={self.length_adaptive_alpha} is not provided: set it to 0, and gae_lambda_policy "
            "to the λ of the policy",
        )


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
    std_rewards: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (baseline, standard deviation) for each sample, [B] each, over the samples with the same prompt.

    With `leave_one_out_baseline`, a sample is left out of its own baseline and standard deviation. If a prompt has
    fewer than two valid samples, each baseline is the sample's own reward, so that advantages are 0.

    Args:
        prompts: The prompts of the samples: one number per prompt, [B], or token ids, [B, S].
        rewards: The reward of each sample, [B].
        valid_mask: 1 for samples that count, and 0 for others, [B].
        leave_one_out_baseline: Whether a sample's own reward is left out.
        std_rewards: The rewards whose standard deviation is returned; None: `rewards`.
    """
    _, groups = prompts.to(rewards.device).unique(dim=0, return_inverse=True)
    valid = (valid_mask.to(rewards.device) != 0).double()
    spread_of = rewards if std_rewards is None else std_rewards
    baseline = rewards.clone() if rewards.is_floating_point() else rewards.float()
    deviation = torch.zeros_like(baseline)
    for group in groups.unique():
        members = (groups == group).nonzero()[:, 0]
        if valid[members].sum() <= 1:
            continue
        weights = valid[members].expand(len(members), -1)
        if leave_one_out_baseline:
            weights = weights * (1 - torch.eye(len(members), device=weights.device))
        baseline[members] = _moments(rewards[members], weights)[0].to(baseline)
        deviation[members] = _moments(spread_of[members], weights)[1].to(baseline)
    return baseline, deviation


def _moments(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the sample standard deviation of `values` [n], weighted by each row of `weights` [n, n].

    The deviation of equal values is exactly 0, because a sum of a few fp32 numbers is exact in fp64.
    """
    values, count = values.double(), weights.sum(1)
    mean = (weights * values).sum(1) / count.clamp(min=1)
    squares = (weights * (values - mean[:, None]) ** 2).sum(1)
    return mean, (squares / (count - 1).clamp(min=1)).sqrt()


def get_gdpo_reward_component_keys(batch: Iterable[object]) -> list[str]:
    """Return the sorted keys of the reward components: `reward/name`, or else `reward1`, `reward2` and so on."""
    keys = [key for key in batch if isinstance(key, str)]
    named = sorted(key for key in keys if key.startswith("reward/"))
    return named or sorted((key for key in keys if re.fullmatch(r"reward\d+", key)), key=lambda key: int(key[6:]))


class _GroupComparison:
    """A comparison of each reward with the rewards of the same prompt."""

    def __init__(self, estimator_config: object, loss_config: object = None) -> None:
        cfg = parse_settings(AdvEstimatorConfig, estimator_config)
        self.use_leave_one_out_baseline, self.normalize_rewards = cfg.use_leave_one_out_baseline, cfg.normalize_rewards

    def compare(self, prompt_ids: Tensor, rewards: Tensor, valid_mask: Tensor | None) -> Tensor:
        """Return the reward of each sample relative to the rewards of its prompt, [B]."""
        valid = torch.ones_like(rewards) if valid_mask is None else valid_mask
        baseline, deviation = calculate_baseline_and_std_per_prompt(
            prompt_ids, rewards, valid, self.use_leave_one_out_baseline
        )
        centred = rewards - baseline
        if not self.normalize_rewards:
            return centred
        return torch.where(deviation > 0, centred / (deviation + _EPSILON), centred)


class GRPOAdvantageEstimator(_GroupComparison):
    """GRPO: the reward relative to the rewards of the same prompt, at every token."""

    def compute_advantage(
        self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, valid_mask: Tensor | None = None, **_: object
    ) -> Tensor:
        """Return the advantages, [B, S]."""
        return self.compare(prompt_ids, rewards, valid_mask)[:, None].expand(mask.shape)


class GDPOAdvantageEstimator(_GroupComparison):
    """GDPO: the weighted sum of the reward components' GRPO advantages, normalised over the batch."""

    def __init__(self, estimator_config: object, loss_config: object = None) -> None:
        super().__init__(estimator_config, loss_config)
        self.reward_weights = parse_settings(AdvEstimatorConfig, estimator_config).reward_weights

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor | None,
        mask: Tensor,
        repeated_batch: Mapping[str, Any],
        valid_mask: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Return the advantages, [B, S], from the components in `repeated_batch`; `rewards` is not read."""
        keys = get_gdpo_reward_component_keys(repeated_batch)
        require(
            len(keys) >= 2,
            f"GDPO requires multiple reward components (reward/name1, reward/name2, …), but the batch has {keys}: use "
            "GRPOAdvantageEstimator for one reward",
        )
        weights = [1.0] * len(keys) if self.reward_weights is None else self.reward_weights
        require(
            len(weights) == len(keys),
            f"reward_weights has {len(weights)} entries, but the batch has {len(keys)} reward components: give one for "
            f"each of {keys}, in this order",
        )
        parts = [self.compare(prompt_ids, repeated_batch[key], valid_mask) for key in keys]
        total = torch.stack([weight * part for weight, part in zip(weights, parts, strict=True)]).sum(0)
        counted = torch.ones_like(total) if valid_mask is None else valid_mask
        return whiten(total[:, None], counted[:, None]).expand(mask.shape)


class _RewardWithKL:
    """The KL penalty in the reward, with the settings of the loss."""

    def __init__(self, loss_config: object) -> None:
        cfg = parse_settings(ClippedPGLossConfig, loss_config)
        self.use_kl_in_reward, self.kl_type = cfg.use_kl_in_reward, cfg.reference_policy_kl_type
        self.kl_coef = cfg.reference_policy_kl_penalty

    def estimate_kl(self, logprobs_policy: Tensor | None, logprobs_reference: Tensor | None) -> Tensor | None:
        """Return the KL estimate of every token, [B, S], or None if the reward has no KL penalty."""
        if not self.use_kl_in_reward or self.kl_coef == 0:
            return None
        if logprobs_policy is None or logprobs_reference is None:
            raise RuleError("use_kl_in_reward needs logprobs_policy and logprobs_reference: pass both")
        return kl_penalty(logprobs_policy, logprobs_reference, self.kl_type)


class ReinforcePlusPlusAdvantageEstimator(_RewardWithKL):
    """REINFORCE++: the reward less its prompt's mean and the token's KL penalty, normalised over the batch's tokens."""

    def __init__(self, estimator_config: object, loss_config: object = None) -> None:
        super().__init__(loss_config)
        self.minus_baseline = parse_settings(AdvEstimatorConfig, estimator_config).minus_baseline

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        valid_mask: Tensor | None = None,
        **_: object,
    ) -> Tensor:
        """Return the advantages, [B, S]."""
        if self.minus_baseline:
            valid = torch.ones_like(rewards) if valid_mask is None else valid_mask
            rewards = rewards - calculate_baseline_and_std_per_prompt(prompt_ids, rewards, valid, False)[0]
        advantages = rewards.float()[:, None].expand(mask.shape)
        kl = self.estimate_kl(logprobs_policy, logprobs_reference)
        return whiten(advantages if kl is None else advantages - self.kl_coef * kl, mask)


class RawRewardAdvantageEstimator:
    """The reward itself at every token, normalised over the batch's tokens unless `normalize_advantages` is false."""

    def __init__(self, estimator_config: object, loss_config: object = None) -> None:
        self.normalize_advantages = parse_settings(GAEConfig, estimator_config).normalize_advantages

    def compute_advantage(self, prompt_ids: Tensor, rewards: Tensor, mask: Tensor, **_: object) -> tuple[Tensor, None]:
        """Return (advantages [B, S], None), because there are no returns without a critic."""
        advantages = rewards.float()[:, None].expand(mask.shape)
        return (whiten(advantages, mask) if self.normalize_advantages else advantages), None


class GeneralizedAdvantageEstimator(_RewardWithKL):
    """GAE with the reward at the last token that counts; returns and advantages may have a different λ each (VAPO)."""

    def __init__(self, estimator_config: object, loss_config: object = None) -> None:
        super().__init__(loss_config)
        cfg = parse_settings(GAEConfig, estimator_config)
        self.gae_lambda, self.gae_gamma = cfg.gae_lambda, cfg.gae_gamma
        self.gae_lambda_value, self.gae_lambda_policy = cfg.gae_lambda_value, cfg.gae_lambda_policy
        self.normalize_advantages = cfg.normalize_advantages

    def compute_advantage(
        self,
        prompt_ids: Tensor,
        rewards: Tensor,
        mask: Tensor,
        values: Tensor,
        *,
        logprobs_policy: Tensor | None = None,
        logprobs_reference: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor]:
        """Return (advantages, returns), [B, S] each."""
        scored = token_rewards(rewards, mask, self.estimate_kl(logprobs_policy, logprobs_reference), self.kl_coef)
        of_policy, of_value = (
            self.gae_lambda if value is None else value for value in (self.gae_lambda_policy, self.gae_lambda_value)
        )
        results = {
            gae_lambda: generalized_advantages(scored, values, mask, discount=self.gae_gamma, gae_lambda=gae_lambda)
            for gae_lambda in {of_policy, of_value}
        }
        advantages, returns = results[of_policy][0], results[of_value][1]
        return (whiten(advantages, mask) if self.normalize_advantages else advantages), returns

"""PPO: a critic learns what to expect of every prefix, and the policy moves towards what turned out better.

Source: Schulman et al. 2017, arXiv:1707.06347; GAE, arXiv:1506.02438; for language models, Ouyang et al. 2022,
arXiv:2203.02155.
"""

from __future__ import annotations

from rl_megatron.algorithms.advantages import generalized_advantages, whiten
from rl_megatron.algorithms.metrics import CRITIC_PREFIX
from rl_megatron.algorithms.rollout import (
    Sampler,
    logprob_mismatch,
    needs_reference,
    reward_kl,
    rewards_per_token,
    statistics,
    with_logprobs,
)
from rl_megatron.algorithms.stage import Stage
from rl_megatron.config.schema import PPOConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses import MSEValueLoss
from rl_megatron.losses.contract import LossFunction
from rl_megatron.losses.registry import configured_loss


def ppo(stage: Stage) -> None:
    algorithm, critic = stage.config.algorithm, stage.critic
    policy_loss = configured_loss(stage.config.loss)
    value_loss = MSEValueLoss({"cliprange": algorithm.value_clip})
    reference = needs_reference(policy_loss)
    if reference:
        stage.policy.freeze_reference()
    sampler = Sampler(stage)

    for step in stage.steps():
        with stage.timer.phase("rollout"):
            rollouts = sampler.draw(step)
        with stage.timer.phase("logprobs"):
            rollouts = with_logprobs(rollouts, stage.policy, reference)
        with stage.timer.phase("values"):
            rollouts["values"] = critic.get_values(rollouts)["values"]
        rollouts = with_advantages(rollouts, algorithm, policy_loss)
        report = statistics(rollouts, algorithm.samples_per_prompt) | logprob_mismatch(rollouts)
        report |= reward_kl(rollouts, policy_loss)
        for _ in range(algorithm.updates_per_rollout):
            learned = stage.train(step, rollouts, value_loss, critic)
            report |= {f"{CRITIC_PREFIX}{name}": value for name, value in learned.items()}
            if step > algorithm.critic_warmup_steps:
                report |= stage.train(step, rollouts, policy_loss)
        stage.record(step, report)


def with_advantages(rollouts: BatchedDataDict, algorithm: PPOConfig, policy_loss: LossFunction) -> BatchedDataDict:
    """The rollouts with GAE's `advantages` and the `returns` that the critic learns, both [B, S]."""
    rewards, mask = rewards_per_token(rollouts, policy_loss), rollouts["token_mask"]
    advantages, rollouts["returns"] = generalized_advantages(
        rewards, rollouts["values"], mask, discount=algorithm.discount, gae_lambda=algorithm.gae_lambda
    )
    rollouts["advantages"] = whiten(advantages, mask) if algorithm.whiten_advantages else advantages
    return rollouts

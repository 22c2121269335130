"""PPO: a critic learns the expected reward of every prefix, and the policy learns to do better than expected.

Source: Schulman et al. 2017, arXiv:1707.06347; GAE, arXiv:1506.02438; for language models, Ouyang et al. 2022,
arXiv:2203.02155.
"""

from __future__ import annotations

from typing import Any

from rl_megatron.algorithms.advantages import generalized_advantages, whiten
from rl_megatron.algorithms.covariances import add_covariance_mask
from rl_megatron.algorithms.metrics import CRITIC_PREFIX
from rl_megatron.algorithms.registry import CriticNeeds, register_algorithm
from rl_megatron.algorithms.rollout import (
    ROLLOUT_LOSS,
    add_logprobs,
    check_policy_gradient,
    needs_reference,
    recomputes_logprobs,
    reward_kl,
    rewards_per_token,
    rollout_loss,
    uses_reference,
    whole_trajectories,
)
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.config.algorithms import PPOConfig
from rl_megatron.losses.contract import LossFunction
from rl_megatron.losses.registry import configured_loss
from rl_megatron.rollouts.sampler import Sampler, derive_batch_seed
from rl_megatron.rollouts.statistics import (
    correction_statistics,
    learned_statistics,
    logprob_mismatch,
)
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy


def _value_loss(algorithm: PPOConfig) -> dict[str, Any]:
    return {"name": "mse_value", "cliprange": algorithm.value_clip}


CRITIC = CriticNeeds[PPOConfig](
    optimizer=lambda algorithm: algorithm.critic_optimizer,
    optimizer_steps=lambda algorithm, train: algorithm.critic_optimizer_steps(train),
    loss=_value_loss,
)


@register_algorithm(
    PPOConfig,
    loss=ROLLOUT_LOSS,
    critic=CRITIC,
    uses_reference=uses_reference,
    check_data=check_policy_gradient,
    progress_metric="reward",
)
def ppo(loop: Loop, policy: MegatronPolicy, sampler: Sampler, algorithm: PPOConfig, critic: MegatronPolicy) -> None:
    policy_loss = rollout_loss(loop.config)
    value_loss = configured_loss(_value_loss(algorithm))
    recompute, reference = recomputes_logprobs(loop.config, algorithm, policy_loss), needs_reference(policy_loss)
    if reference:
        policy.freeze_reference()
    from_engine = loop.config.rollout.correction == "engine"

    for step in loop.steps():
        rollouts, report = sampler.collect(step)
        rollouts = policy.distribute(rollouts, groups=whole_trajectories(rollouts))
        learns = step > algorithm.critic_warmup_steps
        # During the critic's warm-up, no policy loss computes logprobs, but `logprob_mismatch` needs them.
        rollouts = add_logprobs(
            rollouts, policy, recompute=(recompute or not learns) and not from_engine, reference=reference,
            from_engine=from_engine,
        )  # fmt: skip
        with loop.timer.phase("values"):
            rollouts["values"] = critic.get_values(rollouts)["values"]
            loop.timer.count_tokens(rollouts.num_tokens)
        with loop.timer.phase("advantages"):
            rollouts = add_advantages(rollouts, algorithm, policy_loss)
            seed = derive_batch_seed(loop.config.train.seed, loop.batch_number(step))
            rollouts = add_covariance_mask(rollouts, policy_loss, seed)
        sampler.keep(step, rollouts)
        report |= learned_statistics(rollouts, policy.weight_version) | reward_kl(rollouts, policy_loss)
        for _ in range(algorithm.updates_per_rollout):
            learned = loop.train(step, rollouts, value_loss, critic)
            report |= {f"{CRITIC_PREFIX}{name}": value for name, value in learned.items()}
            if learns:
                report |= loop.train(step, rollouts, policy_loss)
                report |= correction_statistics(report)
        loop.record(step, report | logprob_mismatch(rollouts))


def add_advantages(rollouts: Batch, algorithm: PPOConfig, policy_loss: LossFunction) -> Batch:
    """Add GAE's `advantages` and the critic's `returns`, both [B, S], to rollouts, and return them. Collective."""
    index = TrajectoryIndex(rollouts.local)
    per_token = (rewards_per_token(rollouts.local, index, policy_loss), rollouts["values"], rollouts["token_mask"])
    rewards, values, mask = map(index.join, per_token)
    advantages, returns = generalized_advantages(
        rewards, values, mask, discount=algorithm.discount, gae_lambda=algorithm.gae_lambda
    )
    rollouts["returns"] = index.split(returns)
    if algorithm.whiten_advantages:
        advantages = whiten(advantages, mask, rollouts.ranks)
    rollouts["advantages"] = index.split(advantages)
    return rollouts

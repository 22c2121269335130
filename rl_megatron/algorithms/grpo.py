"""GRPO: sample a group of completions per prompt, score them, and make the better ones of each group likelier.

Source: DeepSeekMath, arXiv:2402.03300; dynamic sampling from DAPO, arXiv:2503.14476; advantages relative to the whole
batch from REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

from rl_megatron.algorithms.advantage_estimators import estimate_advantages, group_for_owners
from rl_megatron.algorithms.covariances import add_covariance_mask
from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.algorithms.rollout import (
    ROLLOUT_LOSS,
    add_logprobs,
    check_policy_gradient,
    needs_reference,
    recomputes_logprobs,
    reward_kl,
    rollout_loss,
    uses_reference,
)
from rl_megatron.config.algorithms import GRPOConfig
from rl_megatron.rollouts.sampler import Sampler, seed_of_batch
from rl_megatron.rollouts.statistics import correction_statistics, learned_statistics, logprob_mismatch
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy


@register_algorithm(
    GRPOConfig,
    loss=ROLLOUT_LOSS,
    uses_reference=uses_reference,
    check_data=check_policy_gradient,
    progress_metric="reward",
)
def grpo(loop: Loop, policy: MegatronPolicy, sampler: Sampler, algorithm: GRPOConfig) -> None:
    loss_fn = rollout_loss(loop.config)
    recompute, reference = recomputes_logprobs(loop.config, algorithm, loss_fn), needs_reference(loss_fn)
    if reference:
        policy.freeze_reference()
    from_engine = loop.config.rollout.correction == "engine"

    for step in loop.steps():
        rollouts, outcome = sampler.collect(step)
        rollouts = policy.distribute(rollouts, groups=group_for_owners(rollouts, algorithm))
        rollouts = add_logprobs(rollouts, policy, recompute=recompute, reference=reference, from_engine=from_engine)
        with loop.timer.phase("advantages"):
            rollouts["advantages"] = estimate_advantages(rollouts, algorithm, loss_fn, loop.config.reward)
            seed = seed_of_batch(loop.config.train.seed, loop.batch_number(step))
            rollouts = add_covariance_mask(rollouts, loss_fn, seed)
        sampler.keep(step, rollouts)
        outcome |= learned_statistics(rollouts, policy.weight_version)
        for _ in range(algorithm.updates_per_rollout):
            report = loop.train(step, rollouts, loss_fn)
        report |= correction_statistics(report)
        loop.record(step, report | outcome | logprob_mismatch(rollouts) | reward_kl(rollouts, loss_fn))

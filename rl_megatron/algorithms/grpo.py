"""GRPO: sample a group of completions per prompt, score them, and make the better ones of each group likelier.

Source: DeepSeekMath, arXiv:2402.03300; dynamic sampling from DAPO, arXiv:2503.14476; advantages relative to the whole
batch from REINFORCE++, arXiv:2501.03262.
"""

from __future__ import annotations

from rl_megatron.algorithms.advantage_estimators import estimated_advantages, owned_together
from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.algorithms.rollout import (
    ROLLOUT_LOSS,
    Sampler,
    check_policy_gradient,
    join,
    keep_informative,
    needs_reference,
    owned,
    recomputes_logprobs,
    reward_kl,
    uses_reference,
    with_logprobs,
)
from rl_megatron.algorithms.rollout_statistics import learned_statistics, logprob_mismatch, statistics
from rl_megatron.algorithms.stage import Stage
from rl_megatron.batching.sharded import ShardedBatch
from rl_megatron.config.algorithms import GRPOConfig
from rl_megatron.losses.registry import configured_loss


@register_algorithm(
    GRPOConfig,
    loss=ROLLOUT_LOSS,
    uses_reference=uses_reference,
    check_data=check_policy_gradient,
    progress_metric="reward",
)
def grpo(stage: Stage, algorithm: GRPOConfig) -> None:
    """Train the stage's policy by GRPO."""
    loss_fn = configured_loss(stage.config.loss)
    recompute, reference = recomputes_logprobs(stage.config, algorithm, loss_fn), needs_reference(loss_fn)
    if reference:
        stage.policy.freeze_reference()
    sampler = Sampler(stage, algorithm)

    for step in stage.steps():
        rollouts, outcome = collect(sampler, step, algorithm)
        stage.engine.sleep()
        rollouts = owned(rollouts, stage, owned_together(rollouts, algorithm))
        rollouts = with_logprobs(rollouts, stage.policy, recompute=recompute, reference=reference)
        with stage.timer.phase("advantages"):
            rollouts["advantages"] = estimated_advantages(rollouts, algorithm, loss_fn)
        sampler.keep(step, rollouts)
        outcome |= learned_statistics(rollouts, stage.policy.weight_version)
        for _ in range(algorithm.updates_per_rollout):
            report = stage.train(step, rollouts, loss_fn)
        stage.record(step, report | outcome | logprob_mismatch(rollouts) | reward_kl(rollouts, loss_fn))


def collect(sampler: Sampler, step: int, algorithm: GRPOConfig) -> tuple[ShardedBatch, dict[str, float]]:
    """Return (the rollouts that the step learns from, statistics of all sampled rollouts).

    With dynamic sampling, groups whose rewards are all equal are dropped, and other prompts are sampled until the step
    is full or has used all its rounds.
    """
    group_size = algorithm.samples_per_prompt
    wanted = algorithm.prompts_per_step * group_size
    kept, seen = [], []
    for round_ in range(algorithm.rounds_per_step):
        rollouts = sampler.produce(step, round_)
        seen.append(rollouts)
        kept.append(keep_informative(rollouts, group_size) if algorithm.dynamic_sampling else rollouts)
        if sum(part.num_trajectories for part in kept) >= wanted:
            break
    outcome = statistics(join(seen, len(seen) * wanted), group_size) | sampler.reward_metrics()
    if algorithm.dynamic_sampling:
        outcome["sampling_rounds"] = float(len(seen))
        kept = [part for part in kept if part.size] or seen[-1:]  # if no group differs, the step has no gradient
    return join(kept, wanted), outcome

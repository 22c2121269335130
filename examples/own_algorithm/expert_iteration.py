"""Expert iteration: sample several answers to each prompt, keep those with a high reward, and train on them.

It is also called rejection-sampling fine-tuning. Source: Dong et al. 2023, "RAFT" (arXiv:2304.06767), which keeps the
best answer of each prompt.
"""

from __future__ import annotations

from typing import Literal

from rl_megatron import (
    ConfigError,
    Loop,
    MegatronPolicy,
    Metric,
    NLLLoss,
    RolloutConfig,
    Sampler,
    check_problems,
    declare_metrics,
    register_algorithm,
    section,
)

declare_metrics(Metric("kept", "1", "The share of samples whose reward suffices to train on them.", "mean", "higher"))


@section
class ExpertIterationConfig(RolloutConfig):
    """The settings of expert iteration, besides `prompts_per_step` and `samples_per_prompt`."""

    name: Literal["expert_iteration"] = "expert_iteration"
    min_reward: float = 1.0  # the smallest reward of a sample to train on

    def optimizer_steps(self, train):
        """Return how many optimizer steps the stage takes: `train.global_batch_size` splits the samples of a step."""
        return self.optimizer_steps_of_rollouts(train, rollouts=train.steps, passes=1)

    def check(self, stage):
        """Check the keys against each other and against the other sections of the stage."""
        super().check(stage)  # a temperature of 0 is refused
        if not 0 < self.min_reward <= 1:
            raise ConfigError(f"algorithm.min_reward={self.min_reward} must be above 0 and at most 1, the best reward")


@register_algorithm(ExpertIterationConfig, fixed_loss="nll", check_data=check_problems)
def expert_iteration(loop: Loop, policy: MegatronPolicy, sampler: Sampler, algorithm: ExpertIterationConfig) -> None:
    """Train the policy by expert iteration."""
    loss_fn = NLLLoss()
    for step in loop.steps():
        samples = sampler.draw(step)
        with loop.timer.phase("choose"):
            kept = samples["rewards"] >= algorithm.min_reward
            samples["sample_mask"] = samples["sample_mask"] * kept
        report = loop.train(step, samples, loss_fn)
        outcome = {"reward": samples["rewards"].mean().item(), "kept": kept.float().mean().item()}
        loop.record(step, report | outcome)

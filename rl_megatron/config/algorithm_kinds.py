"""Base classes of algorithm settings: the keys that several algorithms share, and the rules between these keys.

The settings of the package's algorithms are in config/algorithms.py. A plugin's algorithm declares its own in the same
way: as a subclass of `AlgorithmConfig`, `RolloutConfig` or `PairsConfig`, decorated with `@section`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

from rl_megatron.config.data import PAIRS, PROBLEMS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import Positive, register_class, section
from rl_megatron.config.schema import ALGORITHM_CONFIGS, AlgorithmConfig, StageConfig
from rl_megatron.config.train import TrainConfig

register_algorithm_config = register_class("name", ALGORITHM_CONFIGS, declared="learns_from")


def check_whole_pairs(counts: dict[str, int]) -> None:
    """Check that the numbers of sequences in `counts` (key → number) are even: a pair is two sequences."""
    for key, count in counts.items():
        if count % 2:
            raise ConfigError(
                f"{key}={count} must be even: a pair is two sequences, chosen and rejected; set it to {count + 1}"
            )


@section
class PairsConfig(AlgorithmConfig):
    """The settings of algorithms that learn from preference pairs."""

    learns_from: ClassVar[str] = PAIRS

    def check(self, stage: StageConfig) -> None:
        """Check that batches hold whole pairs."""
        check_whole_pairs(
            {
                "train.global_batch_size": stage.train.global_batch_size,
                "train.micro_batch_size": stage.train.micro_batch_size,
                "data.num_eval_examples": stage.data.num_eval_examples or 0,
            }
        )


@section
class RolloutConfig(AlgorithmConfig):
    """The settings of algorithms that sample completions and learn from their rewards."""

    learns_from: ClassVar[str] = PROBLEMS
    usual_batching: ClassVar[str] = "packed"  # completions differ in length

    prompts_per_step: Positive = 32  # prompts per rollout step
    samples_per_prompt: Positive = 8  # completions per prompt, which form a group

    @classmethod
    def usual_batch_size(cls, section: Mapping[str, object]) -> int:
        """Return how many completions a rollout step learns from. A batch of this size makes it one optimizer step."""
        prompts, samples = (section.get(key, getattr(cls, key)) for key in ("prompts_per_step", "samples_per_prompt"))
        if not (isinstance(prompts, int) and isinstance(samples, int)):
            return super().usual_batch_size(section)  # the section's check will refuse the wrong type
        return prompts * cls.learned_per_prompt(samples)

    @classmethod
    def learned_per_prompt(cls, samples: int) -> int:
        """Return how many of a prompt's `samples` completions are learned from."""
        return samples

    @property
    def rounds_per_step(self) -> int:
        """Return the maximum number of times that a step draws `prompts_per_step` prompts."""
        return 1

    @property
    def drops_equal_rewards(self) -> bool:
        """Return whether groups whose rewards are all equal are dropped, and other prompts sampled instead."""
        return False

    @property
    def least_samples(self) -> int:
        """Return how many samples of a prompt must succeed for the policy to learn from them."""
        return 1

    @property
    def reads_components(self) -> bool:
        """Return whether the algorithm reads the scores of each reward function, not only their weighted sum."""
        return False

    @property
    def reads_data_sets(self) -> bool:
        """Return whether the algorithm reads which data set of the mixture each prompt comes from."""
        return False

    def prompts_of_all_steps(self, train: TrainConfig) -> int:
        """Return the maximum number of prompts that the stage draws."""
        return train.steps * self.rounds_per_step * self.prompts_per_step

    def optimizer_steps_of_rollouts(self, train: TrainConfig, rollouts: int, passes: int) -> int:
        """Return how many optimizer steps it takes to learn from `rollouts` rollout steps, `passes` times each."""
        learned = self.prompts_per_step * self.learned_per_prompt(self.samples_per_prompt)
        return rollouts * passes * math.ceil(learned / train.global_batch_size)

    def describe_step(self, train: TrainConfig) -> str:
        """Describe how many completions a rollout step learns from, and in how many optimizer steps."""
        learned = self.prompts_per_step * self.learned_per_prompt(self.samples_per_prompt)
        size = min(train.global_batch_size, learned)
        steps, rest = math.ceil(learned / size), learned % size
        text = f"{learned} completions a rollout step, {steps} optimizer step{'s' * (steps > 1)} of {size}"
        if train.global_batch_size > learned:
            text += f", because train.global_batch_size={train.global_batch_size} exceeds a rollout step's completions"
        return f"{text}, the last of {rest}" if rest else text

    def check(self, stage: StageConfig) -> None:
        """Check that the samples of a prompt can differ: no turn is sampled greedily."""
        if stage.generation.temperature == 0:
            raise ConfigError(
                f"generation.temperature=0 is greedy sampling, but {self.name} needs samples that differ; set it above "
                "0"
            )
        for number, turn in enumerate(stage.rollout.turn_sampling):
            if turn.temperature == 0:
                raise ConfigError(
                    f"rollout.turn_sampling[{number}].temperature=0 is greedy sampling, but {self.name} treats the "
                    "tokens of every turn as sampled; set it above 0"
                )


@section
class PolicyGradientConfig(RolloutConfig):
    """The settings of algorithms whose loss compares the policy with the policy that sampled the completions."""

    may_change_on_resume: ClassVar[frozenset[str]] = frozenset({"recompute_logprobs"})

    # passes over each rollout; each optimizer step of a pass learns from train.global_batch_size sequences
    updates_per_rollout: Positive = 1
    # Whether a separate forward pass computes the policy's logprobs (π_prev) of a rollout before the first optimizer
    # step on it. auto: only if needed, because the policy takes several optimizer steps on a rollout, or because the
    # loss, the rewards or your own function read these logprobs. always: for every rollout. never: for none; refused if
    # they are needed. Without the pass, π_prev comes from the training step's own forward pass, so that π/π_prev is
    # exactly 1.
    recompute_logprobs: Literal["auto", "always", "never"] = "auto"

    def needs_logprobs(self, stage: StageConfig) -> str | None:
        """Return why logprobs must be computed before the policy learns from a rollout; None if they need not be."""
        steps = self.optimizer_steps_of_rollouts(stage.train, 1, self.updates_per_rollout)
        if steps > 1:
            return (
                f"the policy takes {steps} optimizer steps on each rollout (algorithm.updates_per_rollout="
                f"{self.updates_per_rollout}, train.global_batch_size={stage.train.global_batch_size}), and after the "
                "first it is no longer the policy that sampled"
            )
        if stage.loss.get("use_kl_in_reward") and stage.loss.get("reference_policy_kl_penalty") != 0:
            return "loss.use_kl_in_reward=true subtracts a KL of these logprobs from the rewards"
        return None

    def optimizer_steps(self, train: TrainConfig) -> int:
        """Return how many optimizer steps the policy takes."""
        return self.optimizer_steps_of_rollouts(train, train.steps, self.updates_per_rollout)

    def may_read_logprobs(self) -> bool:
        """Return whether advantages may depend on the policy's logprobs of a rollout (π_prev)."""
        return False

    def check(self, stage: StageConfig) -> None:
        """Check that nothing needs the logprobs if `recompute_logprobs=never`."""
        super().check(stage)
        reason = self.needs_logprobs(stage)
        if self.recompute_logprobs == "never" and reason is not None:
            raise ConfigError(f"algorithm.recompute_logprobs=never: {reason}; set it to auto")
        steps = self.optimizer_steps_of_rollouts(stage.train, 1, self.updates_per_rollout)
        if stage.loss.get("use_kl_cov") and steps == 1 and stage.rollout.correction != "engine":
            raise ConfigError(
                "loss.use_kl_cov=true has no effect: its penalty |log π/π_prev| has no gradient in the first optimizer "
                "step on a rollout, and there is no second; raise algorithm.updates_per_rollout or lower "
                f"train.global_batch_size={stage.train.global_batch_size}, or set loss.use_clip_cov=true instead"
            )

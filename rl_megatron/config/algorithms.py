"""The settings of every algorithm of the package, declared beside their rules; the loops are in rl_megatron/algorithms.

A plugin's algorithm declares its settings in the same way: a subclass of `AlgorithmConfig`, or of `RolloutConfig` or
`PairsConfig`, under `@section`.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from rl_megatron.config.data_kinds import ANSWERS, DOCUMENTS, PAIRS, PROBLEMS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.named_class import register_class
from rl_megatron.config.schema import (
    ALGORITHM_CONFIGS,
    AlgorithmConfig,
    ClosedFraction,
    NonNegative,
    Number,
    OptimizerConfig,
    Positive,
    PositiveFloat,
    StageConfig,
    TrainConfig,
    section,
)

register_algorithm_config = register_class("name", ALGORITHM_CONFIGS, declared="learns_from")


@section
class PairsConfig(AlgorithmConfig):
    """The settings of algorithms that learn from preference pairs."""

    learns_from: ClassVar[str] = PAIRS

    def check(self, stage: StageConfig) -> None:
        """Check that batches hold whole pairs."""
        counts = {
            "train.global_batch_size": stage.train.global_batch_size,
            "train.micro_batch_size": stage.train.micro_batch_size,
            "data.num_eval_examples": stage.data.num_eval_examples,
        }
        for key, count in counts.items():
            if count % 2:
                raise ConfigError(
                    f"{key}={count} must be even: a pair is two rows, chosen and rejected; set it to {count + 1}"
                )


@section
class RolloutConfig(AlgorithmConfig):
    """The settings of algorithms that sample completions and learn from their rewards."""

    learns_from: ClassVar[str] = PROBLEMS

    prompts_per_step: Positive = 32
    samples_per_prompt: Positive = 8

    @property
    def rounds_per_step(self) -> int:
        """How many times a step may draw `prompts_per_step` prompts."""
        return 1

    def prompts_of_all_steps(self, train: TrainConfig) -> int:
        """Return how many prompts the stage draws at most."""
        return train.steps * self.rounds_per_step * self.prompts_per_step

    def optimizer_steps_of_rollouts(self, train: TrainConfig, rollouts: int, passes: int) -> int:
        """Return how many optimizer steps `passes` over each of so many steps' rollouts take."""
        samples = self.prompts_per_step * self.samples_per_prompt
        return rollouts * passes * math.ceil(samples / train.global_batch_size)

    def check(self, stage: StageConfig) -> None:
        """Check that the samples of a prompt can differ."""
        if stage.generation.temperature == 0:
            raise ConfigError(
                f"generation.temperature=0 is greedy: {self.name} needs differing samples; set it above 0"
            )


@register_algorithm_config
@section
class PretrainConfig(AlgorithmConfig):
    """Next-token prediction on text."""

    learns_from: ClassVar[str] = DOCUMENTS

    name: Literal["pretrain"] = "pretrain"

    def check(self, stage: StageConfig) -> None:
        length, limit = stage.data.sequence_length, stage.model.max_sequence_length
        if length > limit:
            raise ConfigError(
                f"data.sequence_length={length} exceeds model.max_sequence_length={limit}; lower the one or raise the "
                "other"
            )


@register_algorithm_config
@section
class SFTConfig(AlgorithmConfig):
    """Next-token prediction on answers, given prompts."""

    learns_from: ClassVar[str] = ANSWERS

    name: Literal["sft"] = "sft"


@register_algorithm_config
@section
class DPOConfig(PairsConfig):
    """Direct preference optimisation on pairs."""

    may_change_on_resume: ClassVar[frozenset[str]] = frozenset({"precompute_reference"})

    name: Literal["dpo"] = "dpo"
    # The reference policy's logprobs of all pairs are computed before the first step and kept in output_dir; no second
    # model is held beside the policy.
    precompute_reference: bool = False


@register_algorithm_config
@section
class RewardModelConfig(PairsConfig):
    """Bradley-Terry reward model on pairs."""

    leaves_language_model: ClassVar[bool] = False

    name: Literal["reward_model"] = "reward_model"


@register_algorithm_config
@section
class GRPOConfig(RolloutConfig):
    """Group-relative policy optimisation against a verifiable reward."""

    name: Literal["grpo"] = "grpo"
    prompts_per_step: Positive = 32
    samples_per_prompt: Positive = 8  # at least 2 if advantages are relative to the group
    # group_relative: against the other samples of the prompt; reinforce_plus_plus: returns against the whole batch, in
    # which loss.use_kl_in_reward counts the KL as a cost of each token.
    advantage_estimator: Literal["group_relative", "reinforce_plus_plus"] = "group_relative"
    leave_one_out: bool = False  # baseline: mean of the other samples of the group
    normalize_std: bool = True  # divide advantages by the group's standard deviation (Dr. GRPO: false)
    dynamic_sampling: bool = False  # DAPO: keep only groups with differing rewards, sampling on until full
    dynamic_sampling_max_rounds: Positive = 4
    updates_per_rollout: Positive = 1  # passes over each rollout; train.global_batch_size splits a pass into steps

    @property
    def rounds_per_step(self) -> int:
        return self.dynamic_sampling_max_rounds if self.dynamic_sampling else 1

    def optimizer_steps(self, train: TrainConfig) -> int:
        return self.optimizer_steps_of_rollouts(train, train.steps, self.updates_per_rollout)

    def check(self, stage: StageConfig) -> None:
        super().check(stage)
        group_relative = self.advantage_estimator == "group_relative"
        if self.samples_per_prompt == 1 and (group_relative or self.dynamic_sampling):
            raise ConfigError(
                "algorithm.samples_per_prompt=1 leaves a sample without a group to be compared with; set it to 2 or "
                "more, or algorithm.advantage_estimator=reinforce_plus_plus without dynamic_sampling"
            )
        if group_relative:
            self._check_kl(stage)
            return
        for key, default in {"leave_one_out": False, "normalize_std": True}.items():
            if getattr(self, key) != default:
                raise ConfigError(
                    f"algorithm.{key}={str(not default).lower()} is of advantages relative to a group, which "
                    f"algorithm.advantage_estimator={self.advantage_estimator} does not compute; set it to "
                    f"{str(default).lower()}, or algorithm.advantage_estimator=group_relative"
                )

    def _check_kl(self, stage: StageConfig) -> None:
        if stage.loss.get("use_kl_in_reward"):
            raise ConfigError(
                "loss.use_kl_in_reward=true: advantages relative to a group leave rewards as they are; set it to "
                "false, or algorithm.advantage_estimator=reinforce_plus_plus"
            )


@register_algorithm_config
@section
class PPOConfig(RolloutConfig):
    """Proximal policy optimisation against a verifiable reward, with a learned critic."""

    may_change_on_resume: ClassVar[frozenset[str]] = frozenset({"critic_optimizer"})  # as the policy's optimizer may

    name: Literal["ppo"] = "ppo"
    prompts_per_step: Positive = 32
    samples_per_prompt: Positive = 4
    discount: Annotated[float, Field(gt=0.0, le=1.0), Number] = 1.0  # γ, per token
    gae_lambda: ClosedFraction = 0.95  # λ: 0 trusts the critic, 1 the rewards that came
    whiten_advantages: bool = True  # mean 0 and standard deviation 1 over the tokens of a rollout
    updates_per_rollout: Positive = 1  # passes over each rollout; train.global_batch_size splits a pass into steps
    critic_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic_warmup_steps: NonNegative = 0  # first steps, in which only the critic learns
    value_clip: PositiveFloat | None = 0.2  # how far a value may move from the rollout's; null: any distance

    def optimizer_steps(self, train: TrainConfig) -> int:
        rollouts = train.steps - self.critic_warmup_steps  # the policy learns from none of the warmup's rollouts
        return self.optimizer_steps_of_rollouts(train, rollouts, self.updates_per_rollout)

    def critic_optimizer_steps(self, train: TrainConfig) -> int:
        """Return how many optimizer steps the critic takes."""
        return self.optimizer_steps_of_rollouts(train, train.steps, self.updates_per_rollout)

    def check(self, stage: StageConfig) -> None:
        super().check(stage)
        self.critic_optimizer.check("algorithm.critic_optimizer")
        if self.critic_warmup_steps >= stage.train.steps:
            raise ConfigError(
                f"algorithm.critic_warmup_steps={self.critic_warmup_steps} must be less than train.steps="
                f"{stage.train.steps}, or the policy never learns"
            )

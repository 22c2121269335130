"""The settings of every algorithm of the package and the rules between them.

The training loops are in rl_megatron/algorithms, and settings that several algorithms share are in
config/algorithm_kinds.py.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from rl_megatron.config.advantages import (
    OPTIONS,
    check_estimator_name,
    get_estimator,
)
from rl_megatron.config.algorithm_kinds import (
    PairsConfig,
    PolicyGradientConfig,
    RolloutConfig,
    check_whole_pairs,
    register_algorithm_config,
)
from rl_megatron.config.data import ANSWERS, DOCUMENTS, LABELLED
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import ClosedFraction, NonNegative, Number, Positive, PositiveFloat, section
from rl_megatron.config.optimizer import CriticOptimizerConfig
from rl_megatron.config.schema import AlgorithmConfig, StageConfig
from rl_megatron.config.teachers import TeacherConfig, check_teachers
from rl_megatron.config.train import TrainConfig


@register_algorithm_config
@section
class PretrainConfig(AlgorithmConfig):
    """Next-token prediction on text."""

    learns_from: ClassVar[str] = DOCUMENTS

    name: Literal["pretrain"] = "pretrain"  # the algorithm

    def check(self, stage: StageConfig) -> None:
        """Check that a window of text fits the model."""
        length, limit = stage.data.sequence_length, stage.model.max_sequence_length
        if length > limit:
            raise ConfigError(
                f"data.sequence_length={length} exceeds model.max_sequence_length={limit}; lower the one or raise the "
                "other"
            )


@register_algorithm_config
@section
class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning: next-token prediction on answers, given prompts."""

    learns_from: ClassVar[str] = ANSWERS

    name: Literal["sft"] = "sft"  # the algorithm


@register_algorithm_config
@section
class DistillationConfig(AlgorithmConfig):
    """Distillation: a student learns a teacher's next-token distributions on given answers."""

    learns_from: ClassVar[str] = ANSWERS

    name: Literal["distillation"] = "distillation"  # the algorithm
    teachers: tuple[TeacherConfig, ...] = ()  # the models to learn from
    # How many of the teacher's most likely tokens loss=distillation compares at each position; loss=full_distillation
    # compares the whole vocabulary.
    top_k: Positive = 64

    def check(self, stage: StageConfig) -> None:
        """Check the teachers; see `check_teachers`."""
        check_teachers(self.teachers, stage)


@register_algorithm_config
@section
class OnPolicyDistillationConfig(PolicyGradientConfig):
    """On-policy distillation: the student learns the teacher's next-token distributions on its own completions."""

    usual_loss: ClassVar[str | None] = "full_distillation"

    name: Literal["on_policy_distillation"] = "on_policy_distillation"  # the algorithm
    prompts_per_step: Positive = 32  # prompts per rollout step
    samples_per_prompt: Positive = 1  # completions per prompt
    teachers: tuple[TeacherConfig, ...] = ()  # the models to learn from
    # How many of the teacher's most likely tokens loss=distillation compares at each position. loss=full_distillation
    # compares the whole vocabulary, and the advantage of loss=clipped_pg compares only the sampled token.
    top_k: Positive = 64

    @property
    def reads_data_sets(self) -> bool:
        """Return whether any teacher is for some data sets only."""
        return any(teacher.data_sets for teacher in self.teachers)

    def may_read_logprobs(self) -> bool:
        """Return True: a token's advantage is computed from the policy's logprob."""
        return True

    def check(self, stage: StageConfig) -> None:
        """Check the teachers, and what sampled completions require; see `check_teachers`."""
        super().check(stage)
        check_teachers(self.teachers, stage)


@register_algorithm_config
@section
class DPOConfig(PairsConfig):
    """Direct preference optimisation on pairs."""

    may_change_on_resume: ClassVar[frozenset[str]] = frozenset({"precompute_reference"})

    name: Literal["dpo"] = "dpo"  # the algorithm
    # Compute the reference policy's logprobs of all pairs before the first step and store them in output_dir, instead
    # of keeping a reference model in memory.
    precompute_reference: bool = False

    def check(self, stage: StageConfig) -> None:
        """Check the rules for pairs, and that `precompute_reference` covers all batches of the stage."""
        super().check(stage)
        if self.precompute_reference and stage.train.on_nonfinite == "roll_back":
            raise ConfigError(
                "algorithm.precompute_reference=true computes logprobs for the stage's planned batches only, but "
                "train.on_nonfinite=roll_back continues with later batches; set train.on_nonfinite=skip, or "
                "algorithm.precompute_reference=false"
            )


@register_algorithm_config
@section
class OnlineDPOConfig(RolloutConfig):
    """Direct preference optimisation on pairs of the policy's own completions, ranked by reward."""

    name: Literal["online_dpo"] = "online_dpo"  # the algorithm
    prompts_per_step: Positive = 32  # prompts per rollout step; each gives one pair
    samples_per_prompt: Annotated[int, Field(ge=2), Number] = 2  # completions per prompt: the best and worst are used

    @classmethod
    def learned_per_prompt(cls, samples: int) -> int:
        """Return 2: the best of a prompt's completions and the worst."""
        return 2

    @property
    def least_samples(self) -> int:
        """Return 2: a pair needs two samples."""
        return 2

    def optimizer_steps(self, train: TrainConfig) -> int:
        """Return how many optimizer steps the policy takes."""
        return self.optimizer_steps_of_rollouts(train, train.steps, passes=1)

    def check(self, stage: StageConfig) -> None:
        """Check that batches hold whole pairs, and that rollouts are not asynchronous."""
        super().check(stage)
        check_whole_pairs(
            {
                "train.global_batch_size": stage.train.global_batch_size,
                "train.micro_batch_size": stage.train.micro_batch_size,
            }
        )
        if stage.rollout.async_enabled:
            raise ConfigError(
                "rollout.async_enabled=true: algorithm=online_dpo learns from completions of the current weights; set "
                "it to false, or use algorithm=grpo"
            )


@register_algorithm_config
@section
class KTOConfig(AlgorithmConfig):
    """KTO on single answers that are labelled desirable or undesirable."""

    learns_from: ClassVar[str] = LABELLED

    name: Literal["kto"] = "kto"  # the algorithm

    def check(self, stage: StageConfig) -> None:
        """Check that a batch has two answers: the reference point pairs each prompt with the answer to another."""
        super().check(stage)
        if stage.train.global_batch_size < 2:
            raise ConfigError(
                f"train.global_batch_size={stage.train.global_batch_size}: the reference point of KTO gives each "
                "prompt the answer to another prompt of the batch; set it to 2 or more"
            )


@register_algorithm_config
@section
class RewardModelConfig(PairsConfig):
    """Bradley-Terry reward model on pairs."""

    leaves_language_model: ClassVar[bool] = False

    name: Literal["reward_model"] = "reward_model"  # the algorithm


@register_algorithm_config
@section
class GRPOConfig(PolicyGradientConfig):
    """Group-relative policy optimisation against a verifiable reward."""

    name: Literal["grpo"] = "grpo"  # the algorithm
    prompts_per_step: Positive = 32  # prompts per rollout step
    samples_per_prompt: Positive = 8  # completions per prompt, which form a group; at least 2 for group_relative
    # How a sample's advantage is computed. group_relative: its reward minus the mean of its group.
    # group_relative_turns: for each turn, the sum of rewards from this turn on, minus the group's mean of this sum.
    # group_relative_steps: each turn's reward minus the mean over all turns of the group, summed from each turn on.
    # reinforce_plus_plus: the return of each token, normalized over the whole batch. group_relative_turns,
    # group_relative_steps and reinforce_plus_plus use the rewards of tokens, from which loss.use_kl_in_reward subtracts
    # the KL. reinforce_plus_plus_baseline: the reward minus the group's mean, normalized over the whole batch.
    # optimal_baseline: the reward minus the group's mean weighted by length (OPO). group_decoupled: the scores of each
    # reward function, normalized within the group, are added up with the functions' weights, and the sums are
    # normalized over the whole batch (GDPO). file.py:name or package.module:name: your own function.
    advantage_estimator: Annotated[str, AfterValidator(check_estimator_name)] = "group_relative"
    # group_relative and group_relative_turns: subtract the mean of the other samples of the group (RLOO).
    leave_one_out: bool = False
    normalize_std: bool = True  # group_relative…: divide by the group's standard deviation (Dr. GRPO: false)
    dynamic_sampling: bool = False  # drop groups whose rewards are all equal, and sample other prompts instead (DAPO)
    dynamic_sampling_max_rounds: Positive = 4  # maximum rounds of prompts per step with dynamic_sampling

    @property
    def rounds_per_step(self) -> int:
        """Return the maximum number of times that a step draws `prompts_per_step` prompts."""
        return self.dynamic_sampling_max_rounds if self.dynamic_sampling else 1

    @property
    def drops_equal_rewards(self) -> bool:
        """Return whether groups whose rewards are all equal are dropped, and other prompts sampled instead."""
        return self.dynamic_sampling

    @property
    def least_samples(self) -> int:
        """Return 2 for dynamic sampling, otherwise the number that the advantage estimator needs."""
        return 2 if self.dynamic_sampling else get_estimator(self.advantage_estimator).least_samples

    @property
    def reads_components(self) -> bool:
        """Return whether the advantage estimator may read the scores of each reward function."""
        return "component_rewards" in get_estimator(self.advantage_estimator).reads

    def may_read_logprobs(self) -> bool:
        """Return whether the advantage estimator may read the policy's logprobs; a user's function always may."""
        return "rollouts" in get_estimator(self.advantage_estimator).reads

    def check(self, stage: StageConfig) -> None:
        """Check that samples can be compared, and that the keys suit the advantage estimator."""
        super().check(stage)
        reads = get_estimator(self.advantage_estimator).reads
        if self.samples_per_prompt < self.least_samples:
            raise ConfigError(
                "algorithm.samples_per_prompt=1 leaves a sample without a group to be compared with; set it to 2 or "
                "more, or set algorithm.advantage_estimator=reinforce_plus_plus without dynamic_sampling"
            )
        if "token_rewards" not in reads:
            self._check_kl(stage)
        for key, default in OPTIONS.items():
            if key not in reads and getattr(self, key) != default:
                raise ConfigError(
                    f"algorithm.{key}={str(not default).lower()} has no effect: it applies to advantages relative to a "
                    f"group, but algorithm.advantage_estimator={self.advantage_estimator} does not compute these; set "
                    f"it to {str(default).lower()}, or algorithm.advantage_estimator=group_relative"
                )

    def _check_kl(self, stage: StageConfig) -> None:
        if stage.loss.get("use_kl_in_reward"):
            raise ConfigError(
                f"loss.use_kl_in_reward=true has no effect: algorithm.advantage_estimator={self.advantage_estimator} "
                "does not use token rewards; set it to false, or set algorithm.advantage_estimator=reinforce_plus_plus"
            )


@register_algorithm_config
@section
class PPOConfig(PolicyGradientConfig):
    """Proximal policy optimisation against a verifiable reward, with a learned critic."""

    has_critic: ClassVar[bool] = True

    name: Literal["ppo"] = "ppo"  # the algorithm
    prompts_per_step: Positive = 32  # prompts per rollout step
    samples_per_prompt: Positive = 4  # completions per prompt
    discount: Annotated[float, Field(gt=0.0, le=1.0), Number] = 1.0  # discount γ of the reward, per token
    gae_lambda: ClosedFraction = 0.95  # λ of GAE: 0 relies on the critic alone, 1 on the observed rewards alone
    whiten_advantages: bool = True  # scale advantages to mean 0 and standard deviation 1 over the tokens of a rollout
    critic_optimizer: CriticOptimizerConfig = field(default_factory=CriticOptimizerConfig)  # the critic's optimizer
    critic_warmup_steps: NonNegative = 0  # rollout steps at the start in which only the critic learns
    value_clip: PositiveFloat | None = 0.2  # how far a value may move from its value in the rollout; null: no limit

    def optimizer_steps(self, train: TrainConfig) -> int:
        """Return how many optimizer steps the policy takes."""
        rollouts = train.steps - self.critic_warmup_steps  # the policy does not learn during the warmup
        return self.optimizer_steps_of_rollouts(train, rollouts, self.updates_per_rollout)

    def critic_optimizer_steps(self, train: TrainConfig) -> int:
        """Return how many optimizer steps the critic takes."""
        return super().optimizer_steps(train)

    def check(self, stage: StageConfig) -> None:
        """Check the critic's optimizer and its warmup."""
        super().check(stage)
        self.critic_optimizer.check("algorithm.critic_optimizer")
        if self.critic_warmup_steps >= stage.train.steps:
            raise ConfigError(
                f"algorithm.critic_warmup_steps={self.critic_warmup_steps} must be less than train.steps="
                f"{stage.train.steps}, or the policy never learns; lower the one or raise the other"
            )

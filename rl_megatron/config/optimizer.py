"""The section `optimizer`: the optimizer and the schedule of its learning rate."""

from __future__ import annotations

from typing import Literal

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.settings import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    section,
)

DecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]


@section
class OptimizerConfig:
    """Adam with decoupled weight decay, and a learning rate with linear warmup and then a decay."""

    lr: PositiveFloat = 1e-3  # peak learning rate
    min_lr: NonNegativeFloat = 0.0  # learning rate at the end of the decay
    warmup_steps: NonNegative = 0  # optimizer steps of linear warmup; 0: none
    # Optimizer step at which the decay ends; grpo and ppo may take several per rollout step. null: the stage's last.
    decay_steps: Positive | None = None
    # How lr falls after warmup. A policy that is built in Python without total_steps needs decay_steps for a decay.
    decay_style: DecayStyle = "constant"
    weight_decay: NonNegativeFloat = 0.01  # decoupled weight decay; 0: none
    beta1: Fraction = 0.9  # Adam's decay rate of the mean of gradients
    beta2: Fraction = 0.95  # Adam's decay rate of the mean of squared gradients
    epsilon: PositiveFloat = 1e-8  # added to the denominator of Adam's update
    clip_grad: NonNegativeFloat = 1.0  # largest global gradient norm; 0 turns clipping off
    # Shard the optimizer state over the data-parallel ranks, if there are several.
    distributed: bool = True
    # Sum gradients over ranks during backward and, with distributed, gather updated weights during the next forward.
    overlap: bool = False

    def check(self, where: str) -> None:
        """Check that the warmup ends before the decay does, and that `min_lr` does not exceed `lr`."""
        if self.decay_steps is not None and self.warmup_steps >= self.decay_steps:
            raise ConfigError(
                f"{where}.warmup_steps={self.warmup_steps} must be less than {where}.decay_steps={self.decay_steps}; "
                "lower the one or raise the other"
            )
        if self.min_lr > self.lr:
            raise ConfigError(f"{where}.min_lr={self.min_lr} must not exceed {where}.lr={self.lr}")


@section
class CriticOptimizerConfig(OptimizerConfig):
    """The optimizer of a critic. Its learning rate decays by default, because a run always knows its last step."""

    decay_style: DecayStyle = "cosine"

"""Algorithms: one file each, with a training loop that registers itself. Importing the package registers them all."""

from rl_megatron.algorithms import (
    distillation,
    dpo,
    grpo,
    kto,
    on_policy_distillation,
    online_dpo,
    ppo,
    pretrain,
    reward_model,
    sft,
)
from rl_megatron.algorithms.registry import (
    ALGORITHMS,
    Algorithm,
    CriticNeeds,
    LossNeeds,
    get_algorithm,
    register_algorithm,
)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "CriticNeeds",
    "LossNeeds",
    "get_algorithm",
    "distillation",
    "dpo",
    "grpo",
    "kto",
    "on_policy_distillation",
    "online_dpo",
    "ppo",
    "pretrain",
    "register_algorithm",
    "reward_model",
    "sft",
]

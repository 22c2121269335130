"""The reward functions of this package, registered by their names."""

from rl_megatron.rewards.functions.builtin import (
    ExactMatch,
    Format,
    JsonSchema,
    LengthPenalty,
    MathVerify,
    Overlong,
    Regex,
    gsm8k,
)
from rl_megatron.rewards.functions.code import Code
from rl_megatron.rewards.functions.judge import Judge
from rl_megatron.rewards.functions.reward_model import RewardModelServer

__all__ = [
    "Code",
    "ExactMatch",
    "Format",
    "JsonSchema",
    "Judge",
    "LengthPenalty",
    "MathVerify",
    "Overlong",
    "Regex",
    "RewardModelServer",
    "gsm8k",
]

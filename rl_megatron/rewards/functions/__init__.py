"""The reward functions of this package: one file for each, registered by its name."""

from rl_megatron.rewards.functions.code import Code
from rl_megatron.rewards.functions.exact_match import ExactMatch
from rl_megatron.rewards.functions.format import Format
from rl_megatron.rewards.functions.gsm8k import gsm8k
from rl_megatron.rewards.functions.json_schema import JsonSchema
from rl_megatron.rewards.functions.judge import Judge
from rl_megatron.rewards.functions.length_penalty import LengthPenalty
from rl_megatron.rewards.functions.math_verify import MathVerify
from rl_megatron.rewards.functions.overlong import Overlong
from rl_megatron.rewards.functions.regex import Regex
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

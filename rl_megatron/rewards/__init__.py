"""Rewards: functions that score completions, and the worker processes that run them.

Only `scorer` and `reward_models` import torch, so a worker process imports torch only if the user's file does.
"""

from rl_megatron.rewards.registry import REWARDS, register_reward

__all__ = ["REWARDS", "register_reward"]

"""Tools: functions that the policy calls in its turns, and the formats of these calls."""

from rl_megatron.rollouts.tools.calculator import calculator
from rl_megatron.rollouts.tools.interpreter import python
from rl_megatron.rollouts.tools.registry import register_tool

__all__ = ["calculator", "python", "register_tool"]

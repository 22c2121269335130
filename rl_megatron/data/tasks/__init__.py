"""Tasks: registered sources of problems with verifiable rewards.

A new task is a frozen dataclass with the methods of `Task`, registered with `@register_task("name")`.
"""

from rl_megatron.data.tasks.arithmetic import Arithmetic
from rl_megatron.data.tasks.gsm8k import GSM8K
from rl_megatron.data.tasks.ifeval import IFEval
from rl_megatron.data.tasks.math import Mathematics
from rl_megatron.data.tasks.multiple_choice import GPQA, MultipleChoice
from rl_megatron.data.tasks.registry import TASKS, build_task, register_task
from rl_megatron.data.tasks.task import Demonstration, GeneratedTask, Problem, Task
from rl_megatron.data.tasks.verifiers import Verifiers

__all__ = [
    "GPQA",
    "GSM8K",
    "IFEval",
    "Mathematics",
    "MultipleChoice",
    "TASKS",
    "Arithmetic",
    "Demonstration",
    "GeneratedTask",
    "Problem",
    "Task",
    "Verifiers",
    "build_task",
    "register_task",
]

"""Tasks: problems with verifiable rewards, by name.

A new task is one file here that implements `Task` as a frozen dataclass, and one line in `TASKS`.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from rl_megatron.config.errors import unknown_name
from rl_megatron.data.tasks.arithmetic import Arithmetic
from rl_megatron.data.tasks.gsm8k import GSM8K
from rl_megatron.data.tasks.task import Demonstration, GeneratedTask, Problem, Task

TASKS: dict[str, type] = {task.name: task for task in (Arithmetic, GSM8K)}


def build_task(name: str, **options: Any) -> Task:
    """The task `name` with these options, which are the fields of its dataclass.

    Raises:
        ValueError: an unknown task or option (the nearest is named), a missing option, or what the task raises.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    known = fields(TASKS[name])
    for option in options:
        if option not in {field.name for field in known}:
            raise unknown_name(f"option of task {name!r}", option, (field.name for field in known))
    for field in known:
        if field.default is MISSING and field.name not in options:
            raise ValueError(f"task {name!r} needs the option {field.name!r}; given: {sorted(options) or 'none'}.")
    return TASKS[name](**options)


__all__ = ["TASKS", "Demonstration", "GeneratedTask", "Problem", "Task", "build_task"]

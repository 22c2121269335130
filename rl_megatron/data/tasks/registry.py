"""The registry of tasks: `data.task.name` selects one, and the other keys of `data.task` are its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from rl_megatron.config.errors import unknown_name
from rl_megatron.config.registry import Registry
from rl_megatron.data.tasks.task import Task

TaskT = TypeVar("TaskT", bound=type)

TASKS: Registry[type[Any]] = Registry("task")  # dataclasses with the methods of Task


def register_task(name: str) -> Callable[[TaskT], TaskT]:
    """Return a class decorator that registers a dataclass with the methods of `Task`; its fields are its options.

    Raises:
        TypeError: The class is not a dataclass.
        ValueError: Another task has this name already.
    """

    def add(cls: TaskT) -> TaskT:
        if "__dataclass_fields__" not in vars(cls):
            raise TypeError(f"task {name!r}: {cls.__qualname__} must be a dataclass, whose fields are its options")
        TASKS.register(name)(cls)
        cls.name = name  # for messages; not a field, because fields are options
        return cls

    return add


def build_task(name: str, **options: Any) -> Task:
    """Return the task `name` with these options, which are the fields of its dataclass.

    Raises:
        ValueError: The task or an option is unknown (the message names the nearest one), a required option is missing,
            or the task itself raises it.
    """
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    known = fields(TASKS[name])
    for option in options:
        if option not in {field.name for field in known}:
            raise unknown_name(f"option of task {name!r}", option, (field.name for field in known))
    for field in known:
        if field.default is MISSING and field.default_factory is MISSING and field.name not in options:
            raise ValueError(f"task {name!r} needs the option {field.name!r}; given: {sorted(options) or 'none'}.")
    return TASKS[name](**options)


def check_task_files(task: Task) -> None:
    """Check the files of a task, if it has a method `check_files`, which must not import torch."""
    check = getattr(task, "check_files", None)
    if check is not None:
        check()


def reads_path(name: str) -> bool:
    """Return whether the task `name` has the option `path`, which `data.path` can set."""
    return name in TASKS and "path" in {field.name for field in fields(TASKS[name])}

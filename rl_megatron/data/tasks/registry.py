"""The registry of tasks: `data.task.name` selects one, and the other keys of `data.task` are its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from rl_megatron.config.errors import ConfigError, unknown_name
from rl_megatron.config.loading.import_strings import is_import_string, load_object, raised
from rl_megatron.config.loading.registry import Registry
from rl_megatron.data.tasks.plain import PlainTask
from rl_megatron.data.tasks.task import Task

TaskT = TypeVar("TaskT", bound=type)
ResultT = TypeVar("ResultT")

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
    """Return the task `name` with these options: the fields of its dataclass, or the parameters of its class.

    Args:
        name: A registered name, or the import string of a class.
        **options: The options.

    Raises:
        ValueError: The task or an option is unknown (the message names the nearest one), a required option is missing,
            or the task itself raises it.
        ConfigError: The import string cannot be loaded, or the user's class raises an error.
    """
    task = _task_class(name)
    known = task_options(name)
    for option in options:
        if option not in known:
            raise unknown_name(f"option of task {name!r}", option, known)
    for option, is_required in known.items():
        if is_required and option not in options:
            raise ValueError(f"task {name!r} needs the option {option!r}; given: {sorted(options) or 'none'}.")
    if not is_import_string(name):
        return task(**options)
    made = called(name, lambda: task(**options))
    if hasattr(made, "demonstrations"):  # a whole Task, such as a subclass of one
        return made
    return cast(Task, PlainTask(name, options, made, rebuilt_task))  # a protocol's class variable may be an attribute


def rebuilt_task(name: str, options: Mapping[str, Any]) -> Task:
    """Return the task that `build_task` built in another process."""
    return build_task(name, **options)


def task_options(name: str) -> dict[str, bool]:
    """Return the options of the task `name`, each with whether it is required.

    Raises:
        ValueError: There is no such task.
        ConfigError: Its import string cannot be loaded.
    """
    parameters = inspect.signature(_task_class(name)).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    return {each.name: each.default is each.empty for each in named}


def _task_class(name: str) -> Callable[..., Any]:
    if is_import_string(name):
        return load_object(name, "data.task.name")
    if name not in TASKS:
        raise ValueError(f"data.task.name={name}: {unknown_name('task', name, TASKS)}")
    return TASKS[name]


def check_task_files(task: Task) -> None:
    """Check the files of a task, if it has a method `check_files`, which must not import torch."""
    check = getattr(task, "check_files", None)
    if check is not None:
        check()


def called(name: str, call: Callable[[], ResultT]) -> ResultT:
    """Return `call()`, a call of the task `name` or of one of its methods, which may be a user's.

    Raises:
        ValueError: The method raised it. It names what is wrong itself.
        OSError: So.
        ConfigError: The method raised another error.
    """
    try:
        return call()
    except (ValueError, OSError):
        raise
    except Exception as error:  # a user's task may raise anything
        raise ConfigError(f"data.task.name={name} {raised(error)}") from error


def reads_path(name: str) -> bool:
    """Return whether the task `name` has the option `path`, which `data.path` can set."""
    return "path" in task_options(name)

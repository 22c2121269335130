"""The registry of tasks: `data.task.name` selects one, and the other keys of `data.task` are its options.

`PlainTask` makes a `Task` from a user's class with three methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from rl_megatron.config.errors import ConfigError, unknown_name
from rl_megatron.config.loading.import_strings import describe_user_error, is_import_string, load_object, run_user_code
from rl_megatron.config.loading.registry import Registry
from rl_megatron.data.tasks.task import Demonstration, Problem, Task, choose_items

TaskT = TypeVar("TaskT", bound=type)
ResultT = TypeVar("ResultT")

TASKS: Registry[type[Any]] = Registry("task")  # dataclasses with the methods of Task
_PLAIN_METHODS = ("train_problems", "heldout_problems", "reward")


def register_task(name: str) -> Callable[[TaskT], TaskT]:
    """Return a class decorator that registers a dataclass with the methods of `Task`; its fields are the options.

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


def build_task(name: str, **options: object) -> Task:
    """Build a task with these options; `name` is a registered name or the import string of a class.

    Raise ValueError if the task or an option is unknown, or a required option is missing.
    """
    task_class, declared = _find_class(name), task_options(name)
    for option in options:
        if option not in declared:
            raise unknown_name(f"option of task {name!r}", option, declared)
    for option, is_required in declared.items():
        if is_required and option not in options:
            raise ValueError(f"task {name!r} needs the option {option!r}; given: {sorted(options) or 'none'}.")
    if not is_import_string(name):
        return task_class(**options)
    task = call_task(name, lambda: task_class(**options))
    if hasattr(task, "demonstrations"):  # the class has all methods of `Task`
        return task
    # each `PlainTask` has its own `name`, but the protocol declares a class variable
    return cast(Task, PlainTask(name, options, task))


def _rebuild_task(name: str, options: Mapping[str, object]) -> Task:
    """Build a task that another process pickled."""
    return build_task(name, **options)


def task_options(name: str) -> dict[str, bool]:
    """Return the options of the task `name`, and whether each is required."""
    parameters = inspect.signature(_find_class(name)).parameters.values()
    named = [option for option in parameters if option.kind in (option.POSITIONAL_OR_KEYWORD, option.KEYWORD_ONLY)]
    return {option.name: option.default is option.empty for option in named}


def _find_class(name: str) -> Callable[..., Any]:
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


def call_task(name: str, call: Callable[[], ResultT]) -> ResultT:
    """Return the result of `call`, which builds the task `name` or calls one of its methods, and may run a user's code.

    A ValueError or an OSError is raised unchanged, because its message names what is wrong. Any other error becomes a
    ConfigError that names the task.
    """
    try:
        return call()
    except (ValueError, OSError):
        raise
    except Exception as error:  # a user's task may raise anything
        raise ConfigError(f"data.task.name={name} {describe_user_error(error)}") from error


def reads_path(name: str) -> bool:
    """Return whether the task `name` has the option `path`, which `data.path` can set."""
    return "path" in task_options(name)


# --- users' classes with three methods ---


class PlainTask:
    """A task made from a user's object that has only the methods `train_problems`, `heldout_problems` and `reward`.

    The first two return all problems: `Problem` objects, pairs (prompt, answer), or mappings with a prompt, an answer
    and further fields for the reward. They may take `count` and `seed`. Demonstrations are the training problems with
    their answers.

    A task is pickled as its import string and its options, from which another process rebuilds it.

    Args:
        name: The import string of the user's class.
        options: The arguments of the class.
        task: The user's object.
    """

    def __init__(self, name: str, options: Mapping[str, Any], task: Any) -> None:
        for method in _PLAIN_METHODS:
            if not callable(getattr(task, method, None)):
                raise ValueError(f"task {name!r} has no method {method}; it needs {', '.join(_PLAIN_METHODS)}")
        try:
            inspect.signature(task.reward).bind(None, None)
        except TypeError as error:
            raise ValueError(f"task {name!r}: reward is called with (problem, completion): {error}") from error
        self.name, self._arguments, self._task = name, dict(options), task
        self._options = {method: _list_options(name, method, getattr(task, method)) for method in _PLAIN_METHODS[:2]}

    def __reduce__(self) -> tuple[object, ...]:
        """Return how another process builds the task."""
        return _rebuild_task, (self.name, self._arguments)

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all training problems in their order, or `count` of them chosen by `seed`."""
        return self._choose_problems("train_problems", count, seed)

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all held-out problems in their order, or `count` of them chosen by `seed`."""
        return self._choose_problems("heldout_problems", count, seed)

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return training problems with their answers."""
        return [Demonstration(p.prompt, p.answer, p.record, p.location) for p in self.train_problems(count, seed)]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return the reward of the user's method."""
        return self._task.reward(problem, completion)

    def check_files(self) -> None:
        """Build all problems once, to find errors in them."""
        for method in self._options:
            self._make_problems(method, None, 0)

    def _choose_problems(self, method: str, count: int | None, seed: int) -> list[Problem]:
        problems = self._make_problems(method, count, seed)
        if len(problems) == count:  # the order of the user's method is kept
            return problems
        if count is not None and count > len(problems) and method == "heldout_problems":
            return problems  # an evaluation uses all that there are
        return choose_items(problems, count, seed, f"task {self.name!r}")

    def _make_problems(self, method: str, count: int | None, seed: int) -> list[Problem]:
        values = {"count": count, "seed": seed}
        arguments = {option: values[option] for option in self._options[method]}
        where = f"data.task.name={self.name}: {method}"
        returned = run_user_code(where, lambda: getattr(self._task, method)(**arguments))
        if not isinstance(returned, Iterable) or isinstance(returned, str | Mapping):
            raise ValueError(f"task {self.name!r}: {method} returned a {type(returned).__name__}, and not a list")
        items = run_user_code(where, lambda: list(returned))  # a generator runs the user's code here
        problems = [self._read_problem(method, number, item) for number, item in enumerate(items)]
        if not problems:
            raise ValueError(f"task {self.name!r}: {method} returned no problem")
        return problems

    def _read_problem(self, method: str, number: int, item: object) -> Problem:
        if isinstance(item, Problem):
            return item
        try:
            if isinstance(item, Mapping) and "prompt" in item:
                return Problem(item["prompt"], str(item.get("answer", "")), dict(item))
            if isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
                return Problem(item[0], str(item[1]))
        except ValueError as error:
            raise ValueError(f"task {self.name!r}: item {number} of {method}: {error}") from error
        raise ValueError(
            f"task {self.name!r}: item {number} of {method} is {item!r:.80}; it must be a Problem, a pair (prompt, "
            "answer) or a mapping with a prompt and an answer"
        )


def _list_options(name: str, method: str, function: Callable[..., Any]) -> list[str]:
    """Return which of `count` and `seed` a method takes."""
    parameters = inspect.signature(function).parameters.values()
    options = [parameter.name for parameter in parameters if parameter.name in ("count", "seed")]
    for parameter in parameters:
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name not in options and not is_variable and parameter.default is parameter.empty:
            raise ValueError(f"task {name!r}: {method} needs {parameter.name!r}; it may take only count and seed")
    return options

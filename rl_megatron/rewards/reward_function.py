"""Call reward functions of three forms, and read what they return.

The forms are this package's (one sample at a time), TRL's (whole lists) and verl's. The names of a function's
parameters show which form it has.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from rl_megatron.config.errors import ConfigError, describe_error, nearest
from rl_megatron.data.tasks.task import Problem, Task
from rl_megatron.rewards.samples import Description, Sample

Form = Literal["sample", "list", "verl", "problem"]
LIST_PARAMETERS = {"prompts", "completions"}  # a function with one of these parameters has TRL's form
VERL_PARAMETERS = {"data_source", "solution_str"}
_ALL_VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_TRAJECTORY_PARAMETERS = ("messages", "turns", "metadata", "environment_reward")
# For each form, the parameters that always get a value, whatever fields the record has.
_PROVIDED = {
    "sample": ("prompt", "completion", "completion_ids", "truncated", "answer", "record", *_TRAJECTORY_PARAMETERS),
    "list": ("prompts", "completions", "completion_ids", "log_metric", "log_extra", *_TRAJECTORY_PARAMETERS),
    "verl": _ALL_VERL_PARAMETERS,
}
# Names that data sets give the reference answer. A parameter with such a name gets it if the record lacks the field.
ANSWER_NAMES = ("answer", "ground_truth", "solution")
# Metrics that this package adds to each function's own.
ERRORS, TIMEOUTS, SCORE = "errors", "timeouts", "score"


# --- calls ---


class BadFunction(ValueError):
    """The error if a function cannot serve as a reward function; the message completes "reward.functions[0]: …"."""


class RewardFunction:
    """A reward function with its configured arguments, which is called according to its form."""

    def __init__(self, function: Callable[..., Any], label: str, kwargs: Mapping[str, object] | None = None):
        """Read the function's signature.

        Args:
            function: The function, or a class, which is instantiated with `kwargs`.
            label: Its name in messages.
            kwargs: Further arguments by name.

        Raises:
            BadFunction: The signature has none of the forms, or does not accept `kwargs`.
        """
        self.label, self._kwargs = label, dict(kwargs or {})
        if inspect.isclass(function):
            function, self._kwargs = _instantiate(function, label, self._kwargs), {}
        self._function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            raise BadFunction(f"the signature of {label} cannot be read; wrap it in a Python function") from None
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._names = {parameter.name for parameter in named}
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
                raise BadFunction(f"{label}'s parameter {parameter.name!r} is positional-only; remove the '/'")
        for name in self._kwargs:
            if name not in self._names and not self._takes_all:
                raise BadFunction(f"{label} takes no argument {name!r}{nearest(name, self._names)}")
        is_list, is_verl = self._names & LIST_PARAMETERS, self._names & VERL_PARAMETERS
        self.form: Form = "list" if is_list else "verl" if is_verl else "sample"
        provided = {*_PROVIDED[self.form], *(ANSWER_NAMES if self.form != "verl" else ())}
        required = {parameter.name for parameter in named if parameter.default is parameter.empty}
        self._needed = tuple(sorted(required - set(self._kwargs) - provided))
        needs_answer = {"answer"} if getattr(function, "needs_answer", False) else set()
        self._needed_answers = tuple(sorted(required.intersection(ANSWER_NAMES) - set(self._kwargs) | needs_answer))
        if not self._takes_all and not self._names - set(self._kwargs):
            raise BadFunction(f"{label} takes no part of a sample, such as 'completion'; give it a parameter for one")
        if self.form == "verl" and self._needed:
            raise BadFunction(
                f"{label} has verl's form and needs {list(self._needed)}, which functions of this form do not get"
            )

    @property
    def is_async(self) -> bool:
        """Return whether calls have to be awaited."""
        function = self._function
        while isinstance(function, functools.partial):
            function = function.func
        method = getattr(type(function), "__call__", None)  # noqa: B004  # of an object that is called like a function
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)

    def describe(self) -> Description:
        """Return the description by which the parent process distributes calls."""
        return Description(self.label, self.form, self.is_async, (*self._needed_answers, *self._needed))

    def call(self, sample: Sample) -> Any:
        """Return what the function returns for one sample; a coroutine if it is async."""
        arguments = self._verl_arguments(sample) if self.form == "verl" else self._sample_arguments(sample)
        return self._function(**arguments | self._kwargs)

    def call_list(self, samples: Sequence[Sample], log_metric: Callable[[str, float], None]) -> object:
        """Return what the function returns for all samples; a coroutine if it is async.

        Args:
            samples: The samples.
            log_metric: The function that TRL's reward functions call to report a metric of the whole list.
        """
        return self._function(**self._list_arguments(samples, log_metric) | self._kwargs)

    def _sample_arguments(self, sample: Sample) -> dict[str, object]:
        problem = sample.problem
        for_all = {
            **problem.record,
            "prompt": problem.prompt,
            "completion": sample.completion,
            "completion_ids": sample.completion_ids,
            "truncated": sample.truncated,
            "answer": get_reference_answer(problem),
        }
        by_name = {"record": problem.record, **dict.fromkeys(ANSWER_NAMES, for_all["answer"]), **for_all}
        by_name |= _trajectory_arguments(sample)
        if sample.sequence_ids:
            by_name |= {"sequence_ids": list(sample.sequence_ids), "sequence_text": sample.sequence_text}
        return self._select_arguments(for_all, by_name)

    def _verl_arguments(self, sample: Sample) -> dict[str, object]:
        record = sample.problem.record
        arguments = {
            "data_source": record.get("data_source", ""),
            "solution_str": sample.completion,
            "ground_truth": get_ground_truth(sample.problem),
            "extra_info": record.get("extra_info", {}),
        }
        return self._select_arguments(arguments, arguments)

    def _list_arguments(self, samples: Sequence[Sample], log_metric: Callable[[str, float], None]) -> dict[str, Any]:
        problems = [sample.problem for sample in samples]
        columns = dict.fromkeys(name for problem in problems for name in problem.record)
        for name in ("prompt", "completion"):
            columns.pop(name, None)
        prompts = [get_prompt_messages(problem) for problem in problems]
        trajectories = [_trajectory_arguments(sample) for sample in samples]
        for_all = {name: [problem.record.get(name) for problem in problems] for name in columns} | {
            "prompts": [messages or problem.prompt for messages, problem in zip(prompts, problems, strict=True)],
            "completions": [
                trajectory["messages"][len(messages) :] if messages else sample.completion
                for messages, trajectory, sample in zip(prompts, trajectories, samples, strict=True)
            ],
            "completion_ids": [sample.completion_ids for sample in samples],
            "log_metric": log_metric,
            "log_extra": lambda column, values: None,  # the table of completions is not written
        }
        answers = dict.fromkeys(ANSWER_NAMES, [get_reference_answer(problem) for problem in problems])
        of_trajectories = {name: [arguments[name] for arguments in trajectories] for name in _TRAJECTORY_PARAMETERS}
        return self._select_arguments(for_all, {**answers, **for_all, **of_trajectories})

    def _select_arguments(self, for_all: dict[str, Any], by_name: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments in `by_name` that are parameters; add all of `for_all` if the function has **kwargs."""
        selected = {name: value for name, value in by_name.items() if name in self._names}
        return for_all | selected if self._takes_all else selected


class TaskReward:
    """The reward of a task, which is called for one sample."""

    form: Form = "problem"

    def __init__(self, task: Task, label: str):
        self.label, self._task = label, task

    def describe(self) -> Description:
        """Return the description by which the parent process distributes calls."""
        return Description(self.label, self.form, inspect.iscoroutinefunction(self._task.reward), ())

    def call(self, sample: Sample) -> Any:
        """Return the task's reward of one sample."""
        return self._task.reward(sample.problem, sample.completion)


def get_ground_truth(problem: Problem) -> object:
    """Return the reference answer as verl's functions get it: `reward_model.ground_truth` if the record has it."""
    reward_model = problem.record.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    return get_reference_answer(problem)


def has_reference_answer(problem: Problem) -> bool:
    """Return whether a problem has a reference answer. An empty text is one if the record has it as `answer`."""
    return problem.answer != "" or problem.record.get("answer") is not None or get_ground_truth(problem) != ""


def get_reference_answer(problem: Problem) -> Any:
    """Return the reference answer: the record's `answer` with its own type, or the task's text if it is different."""
    value = problem.record.get("answer")
    return value if value is not None and str(value) == problem.answer else problem.answer


def get_prompt_messages(problem: Problem) -> list[Mapping[str, Any]] | None:
    """Return the messages that the prompt consists of, or None if it is plain text."""
    for name in ("prompt", "messages"):
        value = problem.record.get(name)
        if isinstance(value, list | tuple) and value and all(isinstance(message, Mapping) for message in value):
            messages = list(value)
            while name == "messages" and len(messages) > 1 and messages[-1].get("role") == "assistant":
                messages.pop()  # the reference answer
            return messages
    return None


def run_async(result: object, loop: asyncio.AbstractEventLoop) -> object:
    """Return a function's result; if it is awaitable, await it in `loop`."""

    async def wait(awaitable: Awaitable[object]) -> Any:
        return await awaitable

    return loop.run_until_complete(wait(result)) if inspect.isawaitable(result) else result


def _trajectory_arguments(sample: Sample) -> dict[str, Any]:
    """Return the arguments about the trajectory. Missing messages and turns are built from the completion."""
    messages = list(sample.messages)
    if not messages:
        prompt = get_prompt_messages(sample.problem) or [{"role": "user", "content": sample.problem.prompt}]
        messages = [*prompt, {"role": "assistant", "content": sample.completion}]
    return {
        "messages": messages,
        "turns": list(sample.turns) or [sample.completion],
        "metadata": dict(sample.metadata),
        "environment_reward": sample.environment_reward,
    }


def _instantiate(function_class: type, label: str, kwargs: Mapping[str, object]) -> Callable[..., Any]:
    try:
        function = function_class(**kwargs)
    except ConfigError:
        raise
    except Exception as error:  # the class may be the user's code and may raise anything
        raise BadFunction(f"{label}({', '.join(kwargs)}) raised {describe_error(error)}") from error
    if not callable(function):
        raise BadFunction(f"{label} is a class without __call__; name a function, or a class that can be called")
    return function


# --- results ---


class BadResult(ValueError):
    """The error if a reward function returned something that is not a reward."""


class Score(NamedTuple):
    """A function's score of one sample (None if it does not apply to the sample), and its metrics by name."""

    value: float | None
    metrics: dict[str, float]


def read_result(result: object, may_skip: bool = False) -> Score:
    """Return the score and the metrics in a function's result for one sample.

    Args:
        result: A number, or a mapping with `score` and metrics. Metrics that are not finite numbers are left out.
        may_skip: Whether None is allowed, which means that the function does not apply to this sample.

    Raises:
        BadResult: The result has another form, or the score is not finite; the message completes "the function …".
    """
    metrics: dict[str, float] = {}
    if isinstance(result, Mapping):
        if SCORE not in result:
            raise BadResult(f"returned a mapping without 'score': its keys are {sorted(map(str, result))}")
        for name, value in result.items():
            if name in (ERRORS, TIMEOUTS):
                raise BadResult(f"returned the metric {name!r}, which is a name of this package; rename it")
            number = _to_float(value)
            if name != SCORE and number is not None and math.isfinite(number):
                metrics[str(name)] = number
        result = result[SCORE]
    if result is None and may_skip:
        return Score(None, metrics)
    value = _to_float(result)
    if value is None:
        raise BadResult(f"returned {_show(result)}, which is not a number")
    if not is_finite_reward(value):
        raise BadResult(f"returned {value}; a reward must be finite as a 32-bit number")
    return Score(value, metrics)


def is_finite_reward(value: float) -> bool:
    """Return whether a number is finite as fp32, the type of rewards."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return False
    return math.isfinite(value)


def read_results(result: Any, count: int) -> list[Score]:
    """Return the scores in the result of a function that scores a whole list of samples.

    Args:
        result: A list, array or tensor of results for `read_result`; None means that the function does not apply.
        count: The number of samples.

    Raises:
        BadResult: The result is not such a list; the message completes "the function …".
    """
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise BadResult(f"returned {_show(result)}; it must return a list with a reward for each completion")
    if len(result) != count:
        raise BadResult(f"returned {len(result)} rewards for {count} completions")
    return [read_result(reward, may_skip=True) for reward in result]


def _to_float(value: Any) -> float | None:
    """Return a number, or the only number of an array or tensor, as a float; None for anything else."""
    if not isinstance(value, numbers.Real | Decimal) and callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError):  # more than one number
            return None
    if not isinstance(value, numbers.Real | Decimal):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _show(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}" if value is not None else "None"

"""Call reward functions of three forms: ours, for one sample at a time; TRL's, for whole lists; and verl's.

The names of a function's parameters say which form it has.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from rl_megatron.config.errors import ConfigError, describe_error, nearest
from rl_megatron.data.tasks.task import Problem, Task
from rl_megatron.rewards.samples import Description, Sample

Form = Literal["sample", "list", "verl", "problem"]
OF_LISTS = {"prompts", "completions"}
OF_VERL = {"data_source", "solution_str"}
_VERL_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_OF_TRAJECTORIES = ("messages", "turns", "metadata", "environment_reward")
_OF_EVERY_SAMPLE = ("prompt", "completion", "completion_ids", "truncated", "answer", "record", *_OF_TRAJECTORIES)
_OF_EVERY_LIST = ("prompts", "completions", "completion_ids", "log_metric", "log_extra", *_OF_TRAJECTORIES)
# Other names that datasets have for the reference answer. They stand for it if the record has no such field.
_ANSWERS = ("answer", "ground_truth", "solution")


class BadFunction(ValueError):
    """A function cannot be called as a reward function; the message completes "reward.functions[0]: …"."""


class RewardFunction:
    """A function with its further arguments, which is called in its own form."""

    def __init__(self, function: Callable[..., Any], label: str, kwargs: Mapping[str, Any] | None = None):
        """Read the function's signature.

        Args:
            function: The function, or a class, which is made with the arguments.
            label: Its name in messages.
            kwargs: Further arguments by name.

        Raises:
            BadFunction: The signature has no form that can be called, or does not take the arguments.
        """
        self.label, self._kwargs = label, dict(kwargs or {})
        if inspect.isclass(function):
            function, self._kwargs = _instance(function, label, self._kwargs), {}
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
                raise BadFunction(f"{label}'s parameter {parameter.name!r} has no name to call it by; remove the '/'")
        for name in self._kwargs:
            if name not in self._names and not self._takes_all:
                raise BadFunction(f"{label} takes no argument {name!r}{nearest(name, self._names)}")
        self.form: Form = "list" if self._names & OF_LISTS else "verl" if self._names & OF_VERL else "sample"
        required = {parameter.name for parameter in named if parameter.default is parameter.empty}
        self._needed = tuple(sorted(required - set(self._kwargs) - self._always_given()))
        if not self._takes_all and not self._names - set(self._kwargs):
            raise BadFunction(f"{label} takes no part of a sample, such as 'completion'; give it a parameter for one")
        if self.form == "verl" and self._needed:
            raise BadFunction(
                f"{label} has verl's form and needs {list(self._needed)}, which verl's functions do not get"
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
        """Return what the first rank needs to know to share the calls out."""
        return Description(self.label, self.form, self.is_async, self._needed)

    def call(self, sample: Sample) -> Any:
        """Return what the function returns for one sample; a coroutine if it is async."""
        arguments = self._of_verl(sample) if self.form == "verl" else self._of_sample(sample)
        return self._function(**arguments | self._kwargs)

    def call_list(self, samples: Sequence[Sample], log_metric: Callable[[str, float], None]) -> Any:
        """Return what the function returns for all samples; a coroutine if it is async.

        Args:
            samples: The samples.
            log_metric: Takes a metric of the whole list, as TRL's functions report them.
        """
        return self._function(**self._of_list(samples, log_metric) | self._kwargs)

    def _always_given(self) -> set[str]:
        """Return the parameters for which every sample has a value."""
        given = {"list": _OF_EVERY_LIST, "verl": _VERL_ARGUMENTS, "sample": _OF_EVERY_SAMPLE}[self.form]
        return {*given, *(_ANSWERS if self.form != "verl" else ())}

    def _of_sample(self, sample: Sample) -> dict[str, Any]:
        problem = sample.problem
        given = {
            **problem.record,
            "prompt": problem.prompt,
            "completion": sample.completion,
            "completion_ids": sample.completion_ids,
            "truncated": sample.truncated,
            "answer": reference(problem),
        }
        named = {"record": problem.record, **dict.fromkeys(_ANSWERS, given["answer"]), **given}
        named |= _of_trajectory(sample)
        if sample.sequence_ids:
            named |= {"sequence_ids": list(sample.sequence_ids), "sequence_text": sample.sequence_text}
        return self._taken(given, named)

    def _of_verl(self, sample: Sample) -> dict[str, Any]:
        record = sample.problem.record
        named = {
            "data_source": record.get("data_source", ""),
            "solution_str": sample.completion,
            "ground_truth": ground_truth(sample.problem),
            "extra_info": record.get("extra_info", {}),
        }
        return self._taken(named, named)

    def _of_list(self, samples: Sequence[Sample], log_metric: Callable[[str, float], None]) -> dict[str, Any]:
        problems = [sample.problem for sample in samples]
        columns = dict.fromkeys(name for problem in problems for name in problem.record)
        for name in ("prompt", "completion"):
            columns.pop(name, None)
        conversations = [conversation(problem) for problem in problems]
        trajectories = [_of_trajectory(sample) for sample in samples]
        given = {name: [problem.record.get(name) for problem in problems] for name in columns} | {
            "prompts": [talk or problem.prompt for talk, problem in zip(conversations, problems, strict=True)],
            "completions": [
                each["messages"][len(talk) :] if talk else sample.completion
                for talk, each, sample in zip(conversations, trajectories, samples, strict=True)
            ],
            "completion_ids": [sample.completion_ids for sample in samples],
            "log_metric": log_metric,
            "log_extra": lambda column, values: None,  # the table of completions is not written
        }
        answers = [reference(problem) for problem in problems]
        of_trajectories = {name: [each[name] for each in trajectories] for name in _OF_TRAJECTORIES}
        return self._taken(given, {**dict.fromkeys(_ANSWERS, answers), **given, **of_trajectories})

    def _taken(self, given: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the function takes: all of `given`, or those of `named` that it names."""
        taken = {name: value for name, value in named.items() if name in self._names}
        return given | taken if self._takes_all else taken


class TaskReward:
    """The reward of a task, which is called for one sample."""

    form: Form = "problem"

    def __init__(self, task: Task, label: str):
        """Keep the task."""
        self.label, self._task = label, task

    def describe(self) -> Description:
        """Return what the first rank needs to know to share the calls out."""
        return Description(self.label, self.form, inspect.iscoroutinefunction(self._task.reward), ())

    def call(self, sample: Sample) -> Any:
        """Return the task's reward of one sample."""
        return self._task.reward(sample.problem, sample.completion)


def ground_truth(problem: Problem) -> Any:
    """Return the reference answer as verl's functions get it: `reward_model.ground_truth` if the record has it."""
    of_verl = problem.record.get("reward_model")
    if isinstance(of_verl, Mapping) and "ground_truth" in of_verl:
        return of_verl["ground_truth"]
    return reference(problem)


def reference(problem: Problem) -> Any:
    """Return the reference answer: the record's own value, unless a task has taken its answer out of it."""
    own = problem.record.get("answer")
    return own if own is not None and str(own) == problem.answer else problem.answer


def conversation(problem: Problem) -> list[Mapping[str, Any]] | None:
    """Return the messages that the prompt consists of, or None if it is plain text."""
    for name in ("prompt", "messages"):
        messages = problem.record.get(name)
        if isinstance(messages, list | tuple) and messages and all(isinstance(each, Mapping) for each in messages):
            asked = list(messages)
            while name == "messages" and len(asked) > 1 and asked[-1].get("role") == "assistant":
                asked.pop()  # the reference answer
            return asked
    return None


def _of_trajectory(sample: Sample) -> dict[str, Any]:
    """Return the arguments for what several turns have; those of a single turn follow from the completion."""
    messages = list(sample.messages)
    if not messages:
        asked = conversation(sample.problem) or [{"role": "user", "content": sample.problem.prompt}]
        messages = [*asked, {"role": "assistant", "content": sample.completion}]
    return {
        "messages": messages,
        "turns": list(sample.turns) or [sample.completion],
        "metadata": dict(sample.metadata),
        "environment_reward": sample.environment_reward,
    }


async def finished(result: Awaitable[Any]) -> Any:
    """Return what an awaitable gives."""
    return await result


def run_async(result: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """Return a function's result; one that has to be awaited is awaited in `loop`."""
    return loop.run_until_complete(finished(result)) if inspect.isawaitable(result) else result


def _instance(function: type, label: str, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Return an instance of a class of reward functions."""
    try:
        made = function(**kwargs)
    except ConfigError:
        raise
    except Exception as error:  # the class may be the user's code and may raise anything
        raise BadFunction(f"{label}({', '.join(kwargs)}) raised {describe_error(error)}") from error
    if not callable(made):
        raise BadFunction(f"{label} is a class without __call__; name a function, or a class that can be called")
    return made

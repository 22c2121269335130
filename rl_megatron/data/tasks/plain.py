"""`PlainTask`: a user's class with three methods, as a `Task`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rl_megatron.config.loading.import_strings import user_code
from rl_megatron.data.order import epoch_order
from rl_megatron.data.tasks.task import Demonstration, Problem, TooFewProblems

_METHODS = ("train_problems", "heldout_problems", "reward")


class PlainTask:
    """A task from an object with the methods `train_problems`, `heldout_problems` and `reward`, and no others.

    The first two return all problems: `Problem` objects, pairs (prompt, answer), or mappings with a prompt, an answer
    and further fields for the reward. They may take `count` and `seed`. Demonstrations are the training problems with
    their answers.

    A pickled task is its import string with the options, so that another process builds it anew.

    Args:
        name: The import string of the user's class.
        options: The arguments of the class.
        task: The user's object.
        rebuild: The function that another process builds the task with, from `name` and `options`.

    Raises:
        ValueError: A method is missing, or `reward` does not take a problem and a completion.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], task: Any, rebuild: Callable[[str, Mapping[str, Any]], Any]
    ) -> None:
        for method in _METHODS:
            if not callable(getattr(task, method, None)):
                raise ValueError(f"task {name!r} has no method {method}; it needs {', '.join(_METHODS)}")
        try:
            inspect.signature(task.reward).bind(None, None)
        except TypeError as error:
            raise ValueError(f"task {name!r}: reward is called with (problem, completion): {error}") from error
        self.name, self._given, self._task, self._rebuild = name, dict(options), task, rebuild
        self._options = {method: _options(name, method, getattr(task, method)) for method in _METHODS[:2]}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how another process builds the task."""
        return self._rebuild, (self.name, self._given)

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all training problems in their order, or `count` of them chosen by `seed`."""
        return self._problems("train_problems", count, seed)

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return all held-out problems in their order, or `count` of them chosen by `seed`."""
        return self._problems("heldout_problems", count, seed)

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return training problems with their answers."""
        return [Demonstration(p.prompt, p.answer, p.record, p.location) for p in self.train_problems(count, seed)]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return the reward of the user's method."""
        return self._task.reward(problem, completion)

    def check_files(self) -> None:
        """Make all problems once, so that an error in them is found."""
        for method in self._options:
            self._made(method, None, 0)

    def _problems(self, method: str, count: int | None, seed: int) -> list[Problem]:
        problems = self._made(method, count, seed)
        if count is None or len(problems) == count:
            return problems
        if count > len(problems):
            if method == "heldout_problems":
                return problems  # an evaluation uses all that there are
            raise TooFewProblems(
                f"task {self.name!r} has {len(problems)} of these problems, and {count} were asked for: ask for fewer"
            )
        return [problems[index] for index in epoch_order(len(problems), seed, epoch=0)[:count].tolist()]

    def _made(self, method: str, count: int | None, seed: int) -> list[Problem]:
        values = {"count": count, "seed": seed}
        given = {option: values[option] for option in self._options[method]}
        where = f"data.task.name={self.name}: {method}"
        made = user_code(where, lambda: getattr(self._task, method)(**given))
        if not isinstance(made, Iterable) or isinstance(made, str | Mapping):
            raise ValueError(f"task {self.name!r}: {method} returned a {type(made).__name__}, and not a list")
        items = user_code(where, lambda: list(made))  # a generator runs the user's code here
        problems = [self._problem(method, number, item) for number, item in enumerate(items)]
        if not problems:
            raise ValueError(f"task {self.name!r}: {method} returned no problem")
        return problems

    def _problem(self, method: str, number: int, item: Any) -> Problem:
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


def _options(name: str, method: str, function: Callable[..., Any]) -> list[str]:
    """Return which of count and seed a method takes."""
    parameters = inspect.signature(function).parameters.values()
    taken = [parameter.name for parameter in parameters if parameter.name in ("count", "seed")]
    for parameter in parameters:
        variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.name not in taken and not variable and parameter.default is parameter.empty:
            raise ValueError(f"task {name!r}: {method} needs {parameter.name!r}; it may take only count and seed")
    return taken

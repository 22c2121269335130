"""Messages between a rank and its reward workers: samples, functions, their descriptions and their outcomes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, NamedTuple

from rl_megatron.config.errors import ConfigError, describe_error
from rl_megatron.config.loading.import_strings import imported_files
from rl_megatron.data.tasks.task import Problem
from rl_megatron.workers import frames

_LENGTH_SHOWN = 200  # characters of a prompt or a completion in a message


@dataclass(frozen=True)
class Sample:
    """One completion with its problem.

    Attributes:
        completion_ids: The completion's tokens, with the stop token.
        truncated: Whether the completion ended without a stop token.
        messages: The whole conversation. Without a chat format it is the prompt and the completion.
        turns: The texts of the policy's turns. The completion is the last one.
        metadata: What an environment reports about the trajectory.
        environment_reward: The reward that the environment gave, to which that of the reward functions is added.
        sequence_ids: All tokens up to the end of the completion; empty if no reward model reads them.
        sequence_text: Their text with special tokens, but without those that the tokenizer puts before every text.
    """

    problem: Problem
    completion: str
    completion_ids: list[int]
    truncated: bool
    messages: Sequence[Mapping[str, Any]] = ()
    turns: Sequence[str] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)
    environment_reward: float = 0.0
    sequence_ids: Sequence[int] = ()
    sequence_text: str = ""

    def describe(self) -> str:
        """Return the prompt and the completion, both shortened, for a message."""
        return f"prompt {_shorten(self.problem.prompt)} and completion {_shorten(self.completion)}"


@dataclass(frozen=True)
class FunctionSpec:
    """The data from which a worker loads a reward function.

    Attributes:
        label: The function's name in metrics and messages.
        where: The configuration key, for messages.
        target: The function's import string, or None if `pickled` is set.
        pickled: A pickled function, class or task; None if `target` is set.
        is_task: Whether `pickled` is a task, whose method `reward` is the function.
    """

    label: str
    where: str
    target: str | None = None
    pickled: bytes | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_task: bool = False


class Description(NamedTuple):
    """A worker's description of a function that it has loaded.

    Attributes:
        form: How the function is called: for one sample, for a list of them, as in verl, or as the reward of a task.
        needed: The record fields that the function requires, the reference answer included.
    """

    label: str
    form: Literal["sample", "list", "verl", "problem"]
    is_async: bool
    needed: tuple[str, ...]


class Failure(NamedTuple):
    """The reason why a function gave no score.

    Attributes:
        kind: "timeout" if it took too long, "error" for everything else.
        message: It completes "the function …".
    """

    kind: Literal["error", "timeout"]
    message: str


class Outcome(NamedTuple):
    """The result of one call for one sample. Without a failure, `score` None means that the function does not apply."""

    score: float | None
    metrics: dict[str, float]
    failure: Failure | None = None


def pickle_for_worker(value: object, where: str) -> bytes:
    """Return the pickle of a function, or of an instance of a user's class, for another process.

    What a fresh process can import is sent by name. Everything else, such as a function of `__main__` or of a cell of a
    notebook, is sent with its code.

    Raises:
        ConfigError: The value refers to something that cannot be sent, such as an open file; the message begins with
            `where`.
    """
    import cloudpickle

    name = getattr(value, "__module__", None) or type(value).__module__
    module = sys.modules.get(name)
    if module is not None and not _can_be_imported(module):
        cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(value)
    except Exception as error:  # whatever the object's parts raise
        raise ConfigError(
            f"{where} cannot be sent to a worker process: {describe_error(error)}; define the function in a "
            "file and name it as in file.py:name"
        ) from error


def dumps(message: object) -> bytes:
    """Encode a message for another process; problems of users' classes are sent with the code of these classes."""
    if all(type(sample.problem) is Problem for sample in _find_samples(message)):
        return frames.dumps(message)
    import cloudpickle

    return cloudpickle.dumps(message)


def _shorten(text: str) -> str:
    """Return the text in quotation marks, with the middle of a long one left out."""
    if len(text) > _LENGTH_SHOWN:
        half = _LENGTH_SHOWN // 2
        return f"{text[:half]!r} … {text[-half:]!r} ({len(text)} characters)"
    return repr(text)


def _find_samples(message: object) -> list[Sample]:
    parts = message if isinstance(message, tuple) else ()
    entries = [entry for part in parts for entry in (part if isinstance(part, list) else [part])]
    return [entry for entry in entries if isinstance(entry, Sample)]


def _can_be_imported(module: ModuleType) -> bool:
    """Return whether a process with the same `sys.path` can import the module, or it is `__main__`."""
    if module.__name__ in imported_files():
        return True  # a worker imports these files by the same names
    top = module.__name__.partition(".")[0]
    return (
        top == "__main__"
        or top in sys.builtin_module_names
        or any(finder.find_spec(top, None) is not None for finder in sys.meta_path)  # editable installs add finders
    )

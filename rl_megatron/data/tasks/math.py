"""The task `math`: problems with a mathematical answer, such as those of MATH-500 and AIME.

The library math-verify reads and compares answers. It parses LaTeX. Its time limits use a signal, which only the main
thread of a process can receive, so rewards are computed in that thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.records import Record
from rl_megatron.data.tasks.file_task import FileTask
from rl_megatron.data.tasks.registry import register_task
from rl_megatron.data.tasks.task import Problem

_SECONDS = 5  # time limit for parsing an answer, and for comparing two answers
_REQUEST = "Put your final answer within \\boxed{}."


@register_task("math")
@dataclass(frozen=True)
class Mathematics(FileTask):
    r"""Mathematical problems from local files. math-verify compares a completion's answer with the record's.

    The prompt is the problem and, on a line of its own, "Put your final answer within \boxed{}.".

    Args:
        path: A directory with `train.jsonl` and `test.jsonl`, or one file of which `heldout_fraction` is held out.
        heldout_fraction: The share of problems that is held out, if `path` is a file.
        question_field: The field of the records that has the problem.
        answer_field: The field that has the answer, a number or a text with LaTeX.

    Raises:
        ConfigError: math-verify is not installed.
        FileNotFoundError: There is nothing at `path`.
        ValueError: A line is malformed, or a field is missing; the message names file:line.
    """

    question_field: str = "problem"
    answer_field: str = "answer"

    def __post_init__(self) -> None:
        require_math_verify("data.task.name=math")

    def normalize(self, record: Record) -> Record:
        """Return the record with its question and answer in the fields `question` and `answer`."""
        self.require(record, [("question_field", self.question_field), ("answer_field", self.answer_field)])
        question, answer = record.values[self.question_field], record.values[self.answer_field]
        return Record({**record.values, "question": question, "answer": str(answer)}, record.location)

    def problem(self, record: Record) -> Problem:
        """Return the problem with the request for a boxed answer."""
        prompt = f"{record.values['question']}\n{_REQUEST}\n"
        return Problem(prompt, record.values["answer"], record.values, record.location)

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if math-verify says that the completion's answer equals the problem's, otherwise 0.0."""
        reference = read_reference(problem.answer, _SECONDS)
        return float(are_equal(reference, read_answer(completion, _SECONDS), _SECONDS))

    def final_answer(self, completion: str) -> str | None:
        """Return the completion's answer as a string, or None if math-verify finds no answer in time.

        A number is rounded to 10 digits.
        """
        try:
            answers = read_answer(completion, _SECONDS)
        except TimeoutError:
            return None
        if not answers:
            return None
        is_number = getattr(answers[0], "is_real", False) and getattr(answers[0], "is_number", False)
        return f"{float(answers[0]):.10g}" if is_number else str(answers[0])


def require_math_verify(user: str) -> None:
    """Raise ConfigError if math-verify is not installed. `user` is what needs it, for the message."""
    try:
        import math_verify  # noqa: F401  # here, because most runs do without it
    except ImportError as error:
        raise ConfigError(
            f"{user} needs the library math-verify ({error}): pip install 'rl_megatron[rewards]'"
        ) from error


def read_answer(text: str, seconds: int) -> list[Any]:
    """Return the answers that math-verify finds in a text, the likeliest first; raise TimeoutError after `seconds`."""
    from math_verify import parse
    from math_verify.errors import TimeoutException

    try:
        return parse(text, parsing_timeout=seconds, raise_on_error=True)
    except TimeoutException as error:
        raise TimeoutError(f"math-verify read for {seconds} seconds") from error
    except Exception:  # as by the library's default, a text that it cannot parse has no answer
        return []


def read_reference(answer: str, seconds: int) -> list[object]:
    r"""Parse a reference answer; if nothing is found, as in a bare `\frac{1}{2}`, parse it again within `\boxed{}`."""
    reference = read_answer(answer, seconds) or read_answer(rf"\boxed{{{answer}}}", seconds)
    if not reference:
        raise ValueError(f"math-verify cannot read the reference answer {answer!r}")
    return reference


def are_equal(reference: list[Any], answer: list[Any], seconds: int) -> bool:
    """Return whether math-verify says that an answer equals the reference; raise TimeoutError after `seconds`."""
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        return verify(reference, answer, timeout_seconds=seconds, raise_on_error=True)
    except TimeoutException as error:
        raise TimeoutError(f"math-verify compared for {seconds} seconds") from error
    # as by the library's default, a pair that it cannot compare is unequal, but other pairs may be equal
    except Exception:
        return verify(reference, answer, timeout_seconds=seconds)

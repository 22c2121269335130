"""The task `math`: problems with a mathematical answer, such as those of MATH-500 and AIME."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.data.math_answers import are_equal, read_answer, read_reference, require_math_verify
from rl_megatron.data.records import Record
from rl_megatron.data.tasks.file_task import FileTask
from rl_megatron.data.tasks.registry import register_task
from rl_megatron.data.tasks.task import Problem

_SECONDS = 5  # that reading or comparing may take
_REQUEST = "Put your final answer within \\boxed{}."


@register_task("math")
@dataclass(frozen=True)
class Mathematics(FileTask):
    r"""Problems from local files, with a problem and an answer, which math-verify compares.

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

    def checked(self, record: Record) -> Record:
        """Return the record with its question and answer under our names."""
        self.require(record, [("question_field", self.question_field), ("answer_field", self.answer_field)])
        question, answer = record.values[self.question_field], record.values[self.answer_field]
        return Record({**record.values, "question": question, "answer": str(answer)}, record.location)

    def problem(self, record: Record) -> Problem:
        """Return the problem with the request for a boxed answer."""
        prompt = f"{record.values['question']}\n{_REQUEST}\n"
        return Problem(prompt, record.values["answer"], record.values, record.location)

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if math-verify says that the completion's answer equals the problem's, otherwise 0.0.

        Raises:
            ValueError: math-verify cannot read the problem's answer.
            TimeoutError: Reading or comparing took too long.
        """
        reference = read_reference(problem.answer, _SECONDS)
        return float(are_equal(reference, read_answer(completion, _SECONDS), _SECONDS))

    def final_answer(self, completion: str) -> str | None:
        """Return the answer that math-verify finds in the completion, a number in its shortest form, or None.

        A completion that takes too long to read has no answer.
        """
        try:
            found = read_answer(completion, _SECONDS)
        except TimeoutError:
            return None
        if not found:
            return None
        is_number = getattr(found[0], "is_real", False) and getattr(found[0], "is_number", False)
        return f"{float(found[0]):.10g}" if is_number else str(found[0])

"""The task `gsm8k`: word problems from GSM8K, or files of the same form, whose solutions end in `#### N`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from rl_megatron.data.records import Record
from rl_megatron.data.tasks.file_task import FileTask
from rl_megatron.data.tasks.registry import register_task
from rl_megatron.data.tasks.task import Demonstration, Problem

# A complete number. Characters after it must not make it another number (18k, 1/2, 3e5, 1,23); units and full stops
# may follow.
_FINAL_NUMBER = re.compile(
    r"\s*(?P<sign>-\s?\$?|\$\s?-?)?"
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?![0-9A-Za-z_/^*]|[.,][0-9])"
)


def extract_answer(text: str) -> Decimal | None:
    """Return the number after the last `####`; None if there is no `####`, or no number directly after it.

    `#### 1,234`, `#### $18.50`, `#### -3.`, `#### -$4`, `#### 18 dollars` and `#### 40%` are read. `#### 1/2` and
    `#### 5k` are not, because their digits alone would be another number.
    """
    _, marker, rest = text.rpartition("####")
    match = _FINAL_NUMBER.match(rest.replace("\N{MINUS SIGN}", "-")) if marker else None
    if match is None:
        return None
    number = Decimal(match["number"].replace(",", ""))
    return -number if "-" in (match["sign"] or "") else number


@register_task("gsm8k")
@dataclass(frozen=True)
class GSM8K(FileTask):
    """Problems from local files. Each record has a question, and an answer that ends in `#### N`.

    The prompt is the question and a line break.

    The files are read, and their errors are raised, at the first call of a method.

    Args:
        path: A directory with `train.jsonl` and `test.jsonl`, or one file of which `heldout_fraction` is held out.
        heldout_fraction: The share of problems that is held out, if `path` is a file.
        question_field: The field of a record that has the question.
        answer_field: The field that has the answer.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: A line is malformed, a field is missing, or an answer has no `#### N`; the message names file:line.
    """

    question_field: str = "question"
    answer_field: str = "answer"

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return the problems of `train_problems(count, seed)` with their whole solutions."""
        problems = self.train_problems(count, seed)
        return [Demonstration(p.prompt, p.record["answer"], p.record, p.location) for p in problems]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the completion's final number equals the problem's (18 = 18.0 = 18.00), otherwise 0.0."""
        answer = extract_answer(completion)
        return float(answer is not None and answer == Decimal(problem.answer))

    def final_answer(self, completion: str) -> str | None:
        """Return the final number in its shortest form (18.00 becomes 18), or None if there is none."""
        answer = extract_answer(completion)
        return None if answer is None else f"{answer.normalize():f}"

    def normalize(self, record: Record) -> Record:
        """Return the record with its question and answer in the fields `question` and `answer`."""
        names = {"question": self.question_field, "answer": self.answer_field}
        self.require(record, [(f"{name}_field", field) for name, field in names.items()])
        values = {**record.values, **{name: record.values[field] for name, field in names.items()}}
        answer = values["answer"]
        if not isinstance(answer, str) or extract_answer(answer) is None:
            raise ValueError(f"{record.location}: the answer does not end in '#### N': {answer!r}.")
        return Record(values, record.location)

    def problem(self, record: Record) -> Problem:
        """Return the problem: its prompt is the question and a line break, its answer the number after `####`."""
        answer = str(extract_answer(record.values["answer"]))
        return Problem(f"{record.values['question']}\n", answer, record.values, record.location)

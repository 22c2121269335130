"""The tasks `multiple_choice` and `gpqa`: questions with several choices, of which one is right."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from rl_megatron.data.records import Record
from rl_megatron.data.tasks.file_task import FileTask
from rl_megatron.data.tasks.registry import register_task
from rl_megatron.data.tasks.task import Problem

_REQUEST = 'Answer with the letter of the right choice, as in "Answer: A".'
# "Answer: C", "the answer is (c)", "**Answer:** **C**", "\boxed{C}", "\boxed{\text{C}}" or "Answer: $\mathbf{C}$".
_ANNOUNCED = re.compile(
    r"(?:(?i:answer)(?:(?i:\s+is)\b|\s*\**\s*:)[\s:*$]*|\\boxed\{\s*)(?:\\(?:text|mathbf|mathrm)\{\s*)?"
    r"(?:\(([A-Za-z])\)|\(?([A-Z])\b)"
)
_ALONE = re.compile(r"\(?([A-Z])(?:[.):]|$)")  # a completion that begins with a letter


@dataclass(frozen=True)
class _Choices(FileTask):
    """The base of tasks whose normalized records have the fields `question`, `choices` and `answer` (a letter)."""

    def problem(self, record: Record) -> Problem:
        """Return the problem: its prompt is the question with the choices, and its answer is a letter."""
        choices = [f"{letter}. {text}" for letter, text in zip(ascii_uppercase, record.values["choices"], strict=False)]
        prompt = "\n".join([str(record.values["question"]), *choices, _REQUEST, ""])
        return Problem(prompt, record.values["answer"], record.values, record.location)

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the completion's letter is that of the right choice, otherwise 0.0."""
        return float(self.final_answer(completion) == problem.answer)

    def final_answer(self, completion: str) -> str | None:
        r"""Return the last letter after "answer" or in \boxed{}, or else a letter at the beginning, or else None."""
        announced = _ANNOUNCED.findall(completion)
        if announced:
            return "".join(announced[-1]).upper()
        alone = _ALONE.match(completion.strip())
        return alone[1] if alone else None


@register_task("multiple_choice")
@dataclass(frozen=True)
class MultipleChoice(_Choices):
    """Questions from local files in the form of MMLU: a question, a list of choices, and which of them is right.

    The prompt is the question, the choices with their letters, and the request to answer with a letter.

    Args:
        path: A directory with `train.jsonl` and `test.jsonl`, or one file of which `heldout_fraction` is held out.
        heldout_fraction: The share of problems that is held out, if `path` is a file.
        question_field: The field of the records that has the question.
        choices_field: The field with the list of choices, or with a mapping that has the list under `text`.
        answer_field: The field with the right choice: its number (from 0), its letter or its text.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: A line is malformed, a field is missing, or the answer names no choice; the message names file:line.
    """

    question_field: str = "question"
    choices_field: str = "choices"
    answer_field: str = "answer"

    def normalize(self, record: Record) -> Record:
        """Return the record with the fields `question`, `choices` and `answer` (the letter of the right choice)."""
        self.require(
            record,
            [
                ("question_field", self.question_field),
                ("choices_field", self.choices_field),
                ("answer_field", self.answer_field),
            ],
        )
        choices = record.values[self.choices_field]
        if isinstance(choices, Mapping):
            choices = choices.get("text")
        if not isinstance(choices, Sequence) or isinstance(choices, str) or not 2 <= len(choices) <= 26:
            raise ValueError(
                f"{record.location}: {self.choices_field!r} is not a list of 2 to 26 choices: {choices!r}."
            )
        letter = _find_letter(record.values[self.answer_field], list(map(str, choices)))
        if letter is None:
            raise ValueError(
                f"{record.location}: the answer {record.values[self.answer_field]!r} is neither the number, nor the "
                f"letter, nor the text of one of the {len(choices)} choices."
            )
        values = {"question": record.values[self.question_field], "choices": list(map(str, choices)), "answer": letter}
        return Record({**record.values, **values}, record.location)


@register_task("gpqa")
@dataclass(frozen=True)
class GPQA(_Choices):
    """Questions in the form of GPQA: a question, the correct answer, and three incorrect ones.

    The order of the choices is random, with the question's text as the seed, so that it is the same in every run.

    Args:
        path: A directory with `train.jsonl` and `test.jsonl`, or one file of which `heldout_fraction` is held out.
        heldout_fraction: The share of problems that is held out, if `path` is a file.
        question_field: The field of the records that has the question.
        answer_field: The field with the correct answer.
        incorrect_fields: The fields with incorrect answers.
    """

    question_field: str = "Question"
    answer_field: str = "Correct Answer"
    incorrect_fields: tuple[str, ...] = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

    def normalize(self, record: Record) -> Record:
        """Return the record with the fields `question`, `choices` and `answer` (the letter of the right choice)."""
        fields = [("question_field", self.question_field), ("answer_field", self.answer_field)]
        self.require(record, [*fields, *(("incorrect_fields", name) for name in self.incorrect_fields)])
        correct = str(record.values[self.answer_field]).strip()
        choices = [correct, *(str(record.values[name]).strip() for name in self.incorrect_fields)]
        random.Random(str(record.values[self.question_field])).shuffle(choices)
        values = {
            "question": record.values[self.question_field], "choices": choices,
            "answer": ascii_uppercase[choices.index(correct)],
        }  # fmt: skip
        return Record({**record.values, **values}, record.location)


def _find_letter(answer: object, choices: Sequence[str]) -> str | None:
    """Return the letter of the choice that an answer names, or None if it names no choice."""
    letters = ascii_uppercase[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool):
        return letters[answer] if 0 <= answer < len(letters) else None
    text = str(answer).strip()
    if text in choices:
        return letters[choices.index(text)]
    if len(text) == 1 and text.upper() in letters:
        return text.upper()
    return letters[int(text)] if text.isdecimal() and int(text) < len(letters) else None

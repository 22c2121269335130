"""The task `arithmetic`: generated sums and differences of small numbers, so that a run needs no data files."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from rl_megatron.data.tasks.registry import register_task
from rl_megatron.data.tasks.task import Demonstration, Problem, TooFewProblems

OPERATORS = {"+": int.__add__, "-": int.__sub__}

# Evaluation needs no more, and this limits the memory for large operands.
MAX_HELDOUT_PAIRS = 20_000


@register_task("arithmetic")
@dataclass(frozen=True)
class Arithmetic:
    """Problems `a+b=` and `a-b=`, such as `12+7=` with the answer `19`, for operands from 0 to `max_operand`.

    Whole pairs of operands are held out. If {12, 7} is held out, none of 12+7, 7+12, 12-7 and 7-12 ever appears in
    training problems, demonstrations or pretraining documents, so that the model cannot have memorised the answer.

    Args:
        max_operand: The largest operand: 9, 99 or 999 for one, two or three digits.
        operators: The operators to use: "+", "-" or both.
        zero_pad: Whether numbers are written at full width, `07+12=019`. Digits of the same weight are then always at
            the same position, so that a small model needs a tenth of the steps.
        heldout_fraction: The share of unordered pairs that is held out: at least 1 pair, at most `MAX_HELDOUT_PAIRS`.
        split_seed: The seed that chooses the held-out pairs. It is separate from the `seed` of the methods, so that all
            runs have the same held-out pairs.

    Raises:
        ValueError: `max_operand` is below 1, operators are missing, unknown or repeated, or the fraction is outside
            (0, 1).
    """

    name: ClassVar[str]

    max_operand: int = 99
    operators: tuple[str, ...] = ("+", "-")
    zero_pad: bool = False
    heldout_fraction: float = 0.1
    split_seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "operators", tuple(self.operators))  # YAML gives a list
        if self.max_operand < 1:
            raise ValueError(f"arithmetic: max_operand = {self.max_operand} must be at least 1.")
        operators = set(self.operators)
        if not operators or operators - OPERATORS.keys() or len(operators) < len(self.operators):
            raise ValueError(f"arithmetic: operators = {self.operators} must be some of {tuple(OPERATORS)}, each once.")
        if not 0 < self.heldout_fraction < 1:
            raise ValueError(f"arithmetic: heldout_fraction = {self.heldout_fraction} must lie between 0 and 1.")

    @cached_property
    def heldout_pairs(self) -> frozenset[tuple[int, int]]:
        """Return the held-out pairs of operands, each as (smaller, larger)."""
        num_pairs = (self.max_operand + 1) * (self.max_operand + 2) // 2
        num_heldout = min(max(1, round(num_pairs * self.heldout_fraction)), MAX_HELDOUT_PAIRS, num_pairs - 1)
        numbers = random.Random(self.split_seed).sample(range(num_pairs), num_heldout)
        return frozenset(_find_pair(number) for number in numbers)

    def train_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return `count` problems, drawn with replacement from all that are not held out. `count` must not be None."""
        if count is None:
            raise ValueError("arithmetic generates its training problems: count must be a number.")
        draws = self._draw_training(f"train/{seed}")
        return [next(draws) for _ in range(count)]

    def heldout_problems(self, count: int | None = None, seed: int = 0) -> list[Problem]:
        """Return `count` different held-out problems, or all of them if `count` is None."""
        problems = [
            self._build_problem(first, operator, second)
            for low, high in sorted(self.heldout_pairs)
            for first, second in dict.fromkeys([(low, high), (high, low)])
            for operator in self.operators
        ]
        random.Random(f"heldout/{seed}").shuffle(problems)
        if count is not None and count > len(problems):
            raise TooFewProblems(
                f"arithmetic holds {len(problems)} problems out, and {count} were asked for: ask for fewer, or raise "
                "heldout_fraction or max_operand"
            )
        return problems[:count]

    def demonstrations(self, count: int | None = None, seed: int = 0) -> list[Demonstration]:
        """Return the problems of `train_problems(count, seed)` with their answers."""
        problems = self.train_problems(count, seed)
        return [Demonstration(problem.prompt, problem.answer, problem.record) for problem in problems]

    def pretraining_documents(self, count: int, seed: int = 0) -> list[str]:
        """Return `count` documents of one equation each, such as `12+7=19`, so that a model learns to stop after it."""
        draws = self._draw_training(f"pretraining/{seed}")
        return [problem.prompt + problem.answer for problem, _ in zip(draws, range(count), strict=False)]

    def reward(self, problem: Problem, completion: str) -> float:
        """Return 1.0 if the completion is the answer, apart from white space around it, otherwise 0.0."""
        return float(completion.strip() == problem.answer)

    def final_answer(self, completion: str) -> str | None:
        """Return the completion without white space around it, or None if nothing is left."""
        return completion.strip() or None

    def _draw_training(self, seed: str) -> Iterator[Problem]:
        source = random.Random(seed)
        while True:
            first, second = source.randint(0, self.max_operand), source.randint(0, self.max_operand)
            operator = source.choice(self.operators)
            if (min(first, second), max(first, second)) not in self.heldout_pairs:
                yield self._build_problem(first, operator, second)

    def _build_problem(self, first: int, operator: str, second: int) -> Problem:
        record = {"first": first, "operator": operator, "second": second}
        width = len(str(self.max_operand)) if self.zero_pad else 1
        result_width = len(str(2 * self.max_operand)) if self.zero_pad else 1
        answer = f"{OPERATORS[operator](first, second):0{result_width}d}"
        return Problem(f"{first:0{width}d}{operator}{second:0{width}d}=", answer, record)


def _find_pair(number: int) -> tuple[int, int]:
    """Return the pair at index `number` of (0, 0), (0, 1), (1, 1), (0, 2), (1, 2), …, without listing the pairs."""
    high = (math.isqrt(8 * number + 1) - 1) // 2
    return number - high * (high + 1) // 2, high

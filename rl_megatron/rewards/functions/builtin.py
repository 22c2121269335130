"""The reward functions that compare the completion with the reference answer, a format or a length."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.tasks.gsm8k import extract_answer
from rl_megatron.data.tasks.math import are_equal, read_answer, read_reference, require_math_verify
from rl_megatron.rewards.registry import register_reward

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_FENCED_JSON = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_ANSWER_GROUP = "answer"


# --- the answer ---


@register_reward("exact_match")
@dataclass(frozen=True)
class ExactMatch:
    """1 if the completion is the reference answer, apart from white space around both, otherwise 0.

    Args:
        ignore_case: Whether upper and lower case are the same.
    """

    ignore_case: bool = False

    def __call__(self, completion: str, answer: str) -> float:
        """Return the score of a completion."""
        completion, answer = completion.strip(), str(answer).strip()
        return float(completion.casefold() == answer.casefold() if self.ignore_case else completion == answer)


@register_reward("gsm8k")
def gsm8k(completion: str, answer: str) -> float:
    """Return 1 if the number after the last `####` equals that of the reference answer (18 = 18.0), otherwise 0.

    Args:
        completion: The completion.
        answer: A number, or a solution that ends in `#### N`.

    Raises:
        ValueError: The reference answer is neither.
    """
    number = extract_answer(completion)
    return float(number is not None and number == _read_reference_number(str(answer)))


def _read_reference_number(answer: str) -> Decimal:
    number = extract_answer(answer)
    if number is not None:
        return number
    try:
        return Decimal(answer.strip().replace(",", "").removeprefix("$"))
    except InvalidOperation:
        raise ValueError(f"the reference answer {answer!r} is not a number and does not end in '#### N'") from None


@register_reward("math_verify")
@dataclass(frozen=True)
class MathVerify:
    r"""1 if the answer that math-verify finds in the completion equals the reference answer, otherwise 0.

    A reference answer in which it finds nothing, such as a bare `\frac{1}{2}`, is parsed again within `\boxed{}`.

    Args:
        parsing_seconds: How long parsing one text may take.
        verify_seconds: How long one comparison may take.

    Raises:
        ConfigError: math-verify is not installed.
    """

    parsing_seconds: int = 5
    verify_seconds: int = 5

    def __post_init__(self) -> None:
        require_math_verify("the reward function 'math_verify'")

    def __call__(self, completion: str, answer: str) -> float:
        """Return the score. Raises ValueError for an unreadable reference answer, TimeoutError at a time limit."""
        reference = read_reference(str(answer), self.parsing_seconds)
        return float(are_equal(reference, read_answer(completion, self.parsing_seconds), self.verify_seconds))


# --- the form ---


@register_reward("regex")
@dataclass(frozen=True)
class Regex:
    """1 if a pattern is found in the completion, otherwise 0.

    If the pattern has a group `(?P<answer>…)`, this group of the last match must also equal the reference answer, apart
    from white space around both.

    Args:
        pattern: A regular expression of Python's `re`. A dot also matches a line break.
        whole: Whether the whole completion must match.
    """

    pattern: str
    whole: bool = False

    def __post_init__(self) -> None:
        try:
            self._compiled  # noqa: B018  # a wrong pattern is found before the first step
        except re.error as error:
            raise ValueError(f"pattern={self.pattern!r} is not a regular expression: {error}") from error

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.DOTALL)

    @property
    def needs_answer(self) -> bool:
        """Return whether every record needs a reference answer."""
        return _ANSWER_GROUP in self._compiled.groupindex

    def __call__(self, completion: str, answer: str = "") -> float:
        """Return the score of a completion."""
        if self.whole:
            match = self._compiled.fullmatch(completion)
        else:
            match = next(iter(deque(self._compiled.finditer(completion), maxlen=1)), None)
        if match is None or not self.needs_answer:
            return float(match is not None)
        return float((match[_ANSWER_GROUP] or "").strip() == str(answer).strip())


@register_reward("format")
@dataclass(frozen=True)
class Format:
    """1 if the completion consists of the tagged parts, each once, in this order, otherwise 0.

    Only white space may be around them. No tag may occur within a part.

    Args:
        tags: The names of the tags. A prompt that ends in the first opening tag needs `opened=true`.
        opened: Whether the prompt has the first opening tag, so that the completion begins within the first part.
    """

    tags: tuple[str, ...] = ("think", "answer")
    opened: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.tags, str) or not self.tags:
            raise ValueError(f"tags={self.tags!r} must be a list of names, such as [think, answer]")

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        names = "|".join(re.escape(tag) for tag in self.tags)
        inner = rf"(?:(?!</?(?:{names})>).)*"
        parts = [rf"<{re.escape(tag)}>{inner}</{re.escape(tag)}>" for tag in self.tags]
        if self.opened:
            parts[0] = parts[0].removeprefix(f"<{re.escape(self.tags[0])}>")
        return re.compile(r"\s*" + r"\s*".join(parts) + r"\s*", re.DOTALL)

    def __call__(self, completion: str) -> float:
        """Return the score of a completion."""
        return float(self._pattern.fullmatch(completion) is not None)


@register_reward("json_schema")
@dataclass(frozen=True)
class JsonSchema:
    """1 if the completion is JSON that the schema allows, otherwise 0. The metric `is_json` is 1 for any valid JSON.

    If the completion has blocks in code fences, only the last one is read.

    Args:
        schema: A JSON schema, as a mapping or as the path of a file.

    Raises:
        ConfigError: The library jsonschema is not installed.
        ValueError: The schema is not a valid schema.
    """

    schema: Mapping[str, Any] | str

    def __post_init__(self) -> None:
        try:
            from jsonschema import SchemaError
        except ImportError as error:
            raise ConfigError(
                f"the reward function 'json_schema' needs the library jsonschema ({error}): pip install "
                "'rl_megatron[rewards]'"
            ) from error
        try:
            self._validator  # noqa: B018  # a wrong schema is found before the first step
        except (SchemaError, OSError, json.JSONDecodeError) as error:
            raise ValueError(f"schema: {' '.join(str(error).split())[:200]}") from error

    @cached_property
    def _validator(self) -> Validator:
        from jsonschema.validators import validator_for

        schema = json.loads(Path(self.schema).read_text()) if isinstance(self.schema, str) else dict(self.schema)
        validator_class = validator_for(schema)
        validator_class.check_schema(schema)
        return validator_class(schema)

    def __call__(self, completion: str) -> dict[str, float]:
        """Return the score of a completion."""
        blocks = _FENCED_JSON.findall(completion)
        try:
            value = json.loads(blocks[-1] if blocks else completion)
        except (json.JSONDecodeError, RecursionError):
            return {"score": 0.0, "is_json": 0.0}
        return {"score": float(self._validator.is_valid(value)), "is_json": 1.0}


# --- the length ---


@register_reward("length_penalty")
@dataclass(frozen=True)
class LengthPenalty:
    """−(tokens − free_tokens) / max_tokens for a completion longer than free_tokens, otherwise 0.

    Args:
        max_tokens: The number of tokens beyond free_tokens that cost 1; usually `generation.max_new_tokens`.
        free_tokens: The number of tokens that cost nothing.
    """

    max_tokens: int
    free_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.free_tokens < 0:
            raise ValueError(
                f"max_tokens={self.max_tokens} must be at least 1, free_tokens={self.free_tokens} at least 0"
            )

    def __call__(self, completion_ids: list[int]) -> float:
        """Return the score of a completion."""
        return -max(len(completion_ids) - self.free_tokens, 0) / self.max_tokens


@register_reward("overlong")
@dataclass(frozen=True)
class Overlong:
    """0 up to max_tokens − buffer_tokens, then falling linearly to −1 at max_tokens, and −1 beyond it.

    It is DAPO's soft overlong punishment. Source: arXiv:2503.14476, equation 13.

    Args:
        max_tokens: The length at which the score is −1; usually `generation.max_new_tokens`.
        buffer_tokens: The number of tokens over which the score falls.
    """

    max_tokens: int
    buffer_tokens: int

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise ValueError(f"buffer_tokens={self.buffer_tokens} must be from 1 to max_tokens={self.max_tokens}")

    def __call__(self, completion_ids: list[int]) -> float:
        """Return the score of a completion."""
        excess = len(completion_ids) - (self.max_tokens - self.buffer_tokens)
        return -min(max(excess, 0) / self.buffer_tokens, 1.0)

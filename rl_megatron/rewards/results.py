"""Read what a reward function returns: a number, or a mapping with `score` and further metrics."""

from __future__ import annotations

import math
import numbers
import struct
import traceback
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NamedTuple

# Metrics that this package adds to each function's own.
ERRORS, TIMEOUTS, SCORE = "errors", "timeouts", "score"
_RESERVED = (ERRORS, TIMEOUTS)


class BadResult(ValueError):
    """A reward function returned something that is no reward."""


class Score(NamedTuple):
    """What a function says about one sample.

    Attributes:
        value: The score. None: the function does not apply to this sample.
        metrics: Further numbers by name.
    """

    value: float | None
    metrics: dict[str, float]


def read_result(result: Any, may_skip: bool = False) -> Score:
    """Return the score in a function's result, for one sample.

    Args:
        result: A number, or a mapping with `score` and metrics. Metrics that are not finite numbers are left out.
        may_skip: Whether None is allowed: the function does not apply to this sample.

    Raises:
        BadResult: The result is neither, or the score is not finite; the message completes "the function …".
    """
    metrics: dict[str, float] = {}
    if isinstance(result, Mapping):
        if SCORE not in result:
            raise BadResult(f"returned a mapping without 'score': its keys are {sorted(map(str, result))}")
        for name, value in result.items():
            if name in _RESERVED:
                raise BadResult(f"returned the metric {name!r}, which is a name of this package; rename it")
            number = _as_number(value)
            if name != SCORE and number is not None and math.isfinite(number):
                metrics[str(name)] = number
        result = result[SCORE]
    if result is None and may_skip:
        return Score(None, metrics)
    value = _as_number(result)
    if value is None:
        raise BadResult(f"returned {_shown(result)}, which is not a number")
    if not is_finite_reward(value):
        raise BadResult(f"returned {value}; a reward must be finite as a 32-bit number")
    return Score(value, metrics)


def is_finite_reward(value: float) -> bool:
    """Return whether a number is finite, also as the 32-bit number that a reward becomes."""
    try:
        struct.pack("<f", value)
    except OverflowError:
        return False
    return math.isfinite(value)


def read_results(result: Any, count: int) -> list[Score]:
    """Return the scores in the result of a function that scores a whole list of samples.

    Args:
        result: A list, or an array or a tensor, of what `read_result` reads. None in it: the function does not apply.
        count: The number of samples.

    Raises:
        BadResult: The result is not such a list; the message completes "the function …".
    """
    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise BadResult(f"returned {_shown(result)}; it must return a list with a reward for each completion")
    if len(result) != count:
        raise BadResult(f"returned {len(result)} rewards for {count} completions")
    return [read_result(each, may_skip=True) for each in result]


def _as_number(value: Any) -> float | None:
    """Return a number, or an array or a tensor of one number, as a float; None for anything else."""
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


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}" if value is not None else "None"


def describe_with_place(error: BaseException) -> str:
    """Return an exception's type and message, and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        said = " ".join(str(error).split())
    except Exception:  # of a user's own exception
        said = "its message cannot be read"
    return f"{type(error).__name__}{': ' if said else ''}{said}{place}"

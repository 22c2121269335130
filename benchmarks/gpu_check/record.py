"""What a part finds: checks with their limits, figures, and what could not be measured. Each entry is saved at once."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_ERROR_LENGTH = 6000  # characters
Range = float | tuple[float, float]


@dataclass(frozen=True)
class Check:
    """A statement that holds or does not. `limit` says what `value` had to be, and `place` where it was measured."""

    name: str
    value: float | str
    limit: str
    holds: bool
    place: str = ""


@dataclass(frozen=True)
class Figure:
    """A number that is reported.

    Attributes:
        name: What was measured.
        value: The number, which is the median of repetitions if there are several.
        unit: Its unit.
        goal: The limit that docs/performance.md states for it.
        spread: The smallest and the largest repetition, or their standard deviation.
        prediction: The number, or the smallest and the largest one, that was predicted without a GPU.
    """

    name: str
    value: float
    unit: str
    goal: str = ""
    spread: Range | None = None
    prediction: Range | None = None


def holds_prediction(value: float, prediction: Range) -> bool:
    """Return whether a value is in the predicted range, or at most 25 % from a single predicted number."""
    low, high = prediction if isinstance(prediction, (tuple, list)) else (0.75 * prediction, 1.25 * prediction)
    return low <= value <= high


@dataclass
class Record:
    """The result of one part.

    Attributes:
        path: The file that has the result so far.
        checks: The checks.
        figures: The figures.
        facts: What the figures depend on, such as the name of the GPU.
        not_measured: What could not be measured, with the reason.
        skipped: Why the whole part has nothing to do here, or None.
        error: The traceback of the error that ended the part, or None.
    """

    path: Path
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    skipped: str | None = None
    error: str | None = None

    def at_most(self, name: str, value: float, limit: float, place: str = "") -> None:
        """Check that a number is at most `limit`; NaN is not."""
        self._add_check(Check(name, float(value), f"at most {limit:g}", value <= limit, place))

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Check that a number is at least `limit`; NaN is not."""
        self._add_check(Check(name, float(value), f"at least {limit:g}", value >= limit))

    def equal(self, name: str, found: Any, wanted: Any) -> None:
        """Check that two values are the same."""
        self._add_check(Check(name, str(found), f"equal to {wanted}", found == wanted))

    def figure(
        self, name: str, value: float, unit: str = "", *, at_most: float | None = None, at_least: float | None = None,
        spread: Range | None = None, prediction: Range | None = None,
    ) -> None:  # fmt: skip
        """Report a number; see `Figure`. Its goals are also checks: docs/performance.md states them."""
        value, limits = float(value), {"at most": at_most, "at least": at_least}
        goal = " and ".join(f"{words} {limit:g}" for words, limit in limits.items() if limit is not None)
        self.figures.append(Figure(name, value, unit, goal, spread, prediction))
        self.save()
        if at_most is not None:
            self.at_most(name, value, at_most)
        if at_least is not None:
            self.at_least(name, value, at_least)

    def fact(self, name: str, text: str) -> None:
        """Report what the figures depend on."""
        self.facts[name] = text
        self.save()

    def cannot(self, names: list[str], reason: str) -> None:
        """Say why figures could not be measured."""
        self.not_measured |= dict.fromkeys(names, reason)
        self.save()

    def skip(self, reason: str) -> None:
        """Say why the whole part has nothing to do here."""
        self.skipped = reason
        self.save()

    def fail(self, error: str) -> None:
        """Keep the traceback of the error that ended the part: its beginning and its end."""
        self.error = error if len(error) <= _ERROR_LENGTH else f"{error[:1000]}\n…\n{error[1000 - _ERROR_LENGTH :]}"
        self.save()

    def _add_check(self, check: Check) -> None:
        self.checks.append(check)
        self.save()

    def to_json(self) -> dict[str, Any]:
        """Return the result so far, as JSON has it."""
        return {
            "checks": [asdict(check) for check in self.checks],
            "figures": [asdict(figure) for figure in self.figures],
            "facts": self.facts,
            "not_measured": self.not_measured,
            "skipped": self.skipped,
            "error": self.error,
        }

    def save(self) -> None:
        """Write the result so far."""
        write_json(self.path, self.to_json())


def write_json(path: Path, value: Any) -> None:
    """Write a file in one piece: readers see either the old or the new one. Numbers that are not finite are words."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(_finite(value), indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)


def _finite(value: Any) -> Any:
    """Return the value with every number that JSON does not have as a word."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value

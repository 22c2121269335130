"""What a part finds: checks with their limits, figures, and what could not be measured. Each entry is saved at once."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
    """A number that is reported. `goal` is the limit that docs/performance.md states for it."""

    name: str
    value: float
    unit: str
    goal: str = ""


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
    """

    path: Path
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    not_measured: dict[str, str] = field(default_factory=dict)
    skipped: str | None = None

    def at_most(self, name: str, value: float, limit: float, place: str = "") -> None:
        """Check that a number is at most `limit`; NaN is not."""
        self._add_check(Check(name, float(value), f"at most {limit:g}", value <= limit, place))

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Check that a number is at least `limit`; NaN is not."""
        self._add_check(Check(name, float(value), f"at least {limit:g}", value >= limit))

    def equal(self, name: str, found: Any, wanted: Any) -> None:
        """Check that two values are the same."""
        self._add_check(Check(name, str(found), f"equal to {wanted}", found == wanted))

    def figure(self, name: str, value: float, unit: str = "", *, at_most: float | None = None) -> None:
        """Report a number. With `at_most`, it is also a check: docs/performance.md states this goal."""
        goal = "" if at_most is None else f"at most {at_most:g}"
        self.figures.append(Figure(name, float(value), unit, goal))
        if at_most is None:
            self.save()
        else:
            self.at_most(name, float(value), at_most)

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
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value

"""`Finding`: what one check of `rl-megatron doctor` found, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        check: The check's name, such as "ports".
        state: "problem" if a run would fail or give wrong results, "warning" if it would be slow or was not tried.
        message: What was found.
        remedy: What to do; empty if there is nothing to do.
        host: The node, if several were checked.
    """

    check: str
    state: State
    message: str
    remedy: str = ""
    host: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the finding as JSON can hold it."""
        return asdict(self)


def ok(check: str, message: str) -> Finding:
    """Return a finding without anything to do."""
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str) -> Finding:
    """Return a finding that a run survives."""
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str) -> Finding:
    """Return a finding that a run does not survive."""
    return Finding(check, "problem", message, remedy)


def refusal(check: str, error: Exception) -> Finding:
    """Return the problem that a `ConfigError` describes; its remedy is what follows the last semicolon."""
    message, _, remedy = str(error).rpartition("; ")
    return problem(check, message, remedy) if message else problem(check, remedy, "")


def count(findings: Sequence[Finding], state: State) -> int:
    """Return how many findings have a state."""
    return sum(finding.state == state for finding in findings)

"""The figures of a rank, which both sides return."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Static:
    """Bytes that a rank holds between phases."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class OfPhase:
    """Live bytes when a phase begins, at its peak, and when it has ended."""

    before: int
    peak: int
    after: int


@dataclass(frozen=True)
class OfRank:
    """What a rank uses, by phase."""

    static: Static
    phases: dict[str, OfPhase]

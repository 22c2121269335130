"""Limits of trajectories, and the errors that say that one was reached."""

from __future__ import annotations

from dataclasses import dataclass


class HistoryFull(RuntimeError):
    """No further token fits a trajectory: its context or its number of sampled tokens is at the limit."""


@dataclass(frozen=True)
class TokenLimits:
    """The most tokens of a trajectory.

    Attributes:
        context: All tokens of a history, those of prompts and environments included.
        sampled: The tokens that the policy samples in it.
    """

    context: int
    sampled: int

"""`RunningStatistics`: the mean and the standard deviation of all numbers seen so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_SMALLEST_STD = 1e-6  # scores that are all equal become 0


@dataclass
class RunningStatistics:
    """The count, the mean and the sum of squared deviations, in double precision.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Sequence[float]) -> None:
        """Count further numbers."""
        number = len(values)
        if not number:
            return
        mean = math.fsum(values) / number
        squares = math.fsum((value - mean) ** 2 for value in values)
        total, apart = self.count + number, mean - self.mean
        self.squares += squares + apart**2 * self.count * number / total
        self.mean += apart * number / total
        self.count = total

    def normalized(self, value: float) -> float:
        """Return a number without the mean, in standard deviations."""
        if not self.count:
            return value
        return (value - self.mean) / max(math.sqrt(self.squares / self.count), _SMALLEST_STD)

    def state_dict(self) -> dict[str, float]:
        """Return the three numbers."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from what `state_dict` returned."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])

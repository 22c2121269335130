"""`RewardMetrics`: the metrics and scores of reward functions, added up over samples."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RewardMetrics:
    """The metrics of reward functions, added up over calls of `Scorer.score`.

    Attributes:
        scores: The scores of each function for every sample, by its label; None where it does not apply.
    """

    scores: dict[str, list[float | None]] = field(default_factory=dict)
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    _counts: dict[str, float] = field(default_factory=dict)

    def observe(self, name: str, value: float) -> None:
        """Add one sample's value of a metric that is reported as a mean."""
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + value, count + 1

    def count(self, name: str, number: int) -> None:
        """Add to a metric that is reported as a sum."""
        self._counts[name] = self._counts.get(name, 0.0) + number

    def add(self, other: RewardMetrics) -> None:
        """Add the metrics of another call."""
        for name, (total, count) in other._sums.items():
            before, number = self._sums.get(name, (0.0, 0))
            self._sums[name] = before + total, number + count
        for name, number in other._counts.items():
            self._counts[name] = self._counts.get(name, 0.0) + number
        for label, scores in other.scores.items():
            self.scores.setdefault(label, []).extend(scores)

    def values(self) -> dict[str, float]:
        """Return the metrics by name."""
        return {name: total / count for name, (total, count) in self._sums.items()} | self._counts

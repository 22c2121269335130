"""The metrics of reward functions: their declarations, and `RewardMetrics`, which adds them up over samples."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_megatron.config.metrics import Metric

# In these names, <function> is the label of a function, and <metric> the name of a metric that it returns.
OF_FUNCTIONS = (
    Metric("reward_<function>_score", "reward", "The mean score of the function, before its weight.", "mean"),
    Metric(
        "reward_<function>_<metric>",
        "the function's",
        "The mean of a metric that the function returns beside its score, over the samples that have the metric.",
        "mean",
    ),
    Metric(
        "reward_<function>_errors",
        "samples",
        "The number of samples for which the function failed, if `reward.on_error` is zero.",
        "sum",
        "lower",
    ),
    Metric(
        "reward_<function>_timeouts",
        "samples",
        "The number of samples for which the function took too long, if `reward.on_timeout` is zero.",
        "sum",
        "lower",
    ),
)


@dataclass
class RewardMetrics:
    """The metrics of reward functions, added up over calls of `Scorer.score`."""

    # For each function's label, the scores of all samples; None for samples to which the function does not apply.
    scores: dict[str, list[float | None]] = field(default_factory=dict)
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)
    _counts: dict[str, float] = field(default_factory=dict)

    def observe(self, name: str, value: float) -> None:
        """Add one sample's value of a metric that is reported as a mean."""
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + value, count + 1

    def count(self, name: str, number: float) -> None:
        """Add to a metric that is reported as a sum."""
        self._counts[name] = self._counts.get(name, 0.0) + number

    def add(self, other: RewardMetrics) -> None:
        """Add the metrics of another call."""
        for name, (total, count) in other._sums.items():
            own_total, own_count = self._sums.get(name, (0.0, 0))
            self._sums[name] = own_total + total, own_count + count
        for name, number in other._counts.items():
            self.count(name, number)
        for label, scores in other.scores.items():
            self.scores.setdefault(label, []).extend(scores)

    def values(self) -> dict[str, float]:
        """Return the metrics by name."""
        return {name: total / count for name, (total, count) in self._sums.items()} | self._counts

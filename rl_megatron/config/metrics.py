"""Declare the metrics of a run: their names in metrics.jsonl, their units and meanings, and which way is better."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from rl_megatron.config.registry import Registry

METRICS_FILE, SAMPLES = "metrics.jsonl", "samples.jsonl"  # in the output directory of a run
_COST = re.compile(r"seconds|.*_seconds|time_.*_s|.*_per_s(_.*)?|tflops_per_rank|mfu|pipeline_bubble|peak_memory_.*_gb")

# How a value is computed from its parts. sum: the parts of microbatches and ranks are added; for a mean over tokens,
# each part was divided by the global count before. min, max, mean, quantile: over all tokens, samples or optimizer
# steps that the meaning names. last: the newest value.
MetricReduction = Literal["sum", "min", "max", "mean", "quantile", "last"]
Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """The declaration of one metric.

    Attributes:
        name: The key in metrics.jsonl.
        unit: The unit of a value; "1" for a share or a ratio.
        meaning: The meaning of the value, in a sentence.
        reduction: How the value is computed from its parts.
        better: Which way is better; None if neither is better, or if it depends on the run.
        healthy: The values that it usually has in a run that learns; empty if there is nothing to say.
    """

    name: str
    unit: str
    meaning: str
    reduction: MetricReduction
    better: Direction | None = None
    healthy: str = ""

    def __post_init__(self) -> None:
        for field, allowed in (("reduction", get_args(MetricReduction)), ("better", (None, *get_args(Direction)))):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"metric {self.name!r}: {field}={value!r} is not one of {allowed}")
        if not (self.name and self.unit and self.meaning):
            raise ValueError(f"metric {self.name!r} needs a name, a unit and a meaning")


# Metrics of losses, rollouts and engines. Metrics of an evaluation are in `eval_metrics.EVAL_METRICS`.
METRICS: Registry[Metric] = Registry("metric")


def declare_metrics(*metrics: Metric, registry: Registry[Metric] = METRICS) -> tuple[Metric, ...]:
    """Add metrics to the registry, and return them. Declaring an equal metric again has no effect.

    Raises:
        ValueError: Another metric has one of the names.
    """
    for metric in metrics:
        if metric.name not in registry or registry[metric.name] != metric:
            registry.register(metric.name)(metric)
    return metrics


def is_cost(name: str) -> bool:
    """Return whether a metric is a time, a speed or an amount of memory. All others are equal in two equal runs."""
    return _COST.fullmatch(name) is not None

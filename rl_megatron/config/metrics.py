"""Declare the metrics of a run: names in metrics.jsonl, units, meanings, and whether higher or lower is better."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rl_megatron.config.loading.registry import Registry

METRICS_FILE, SAMPLES = "metrics.jsonl", "samples.jsonl"  # in the output directory of a run
_COST = re.compile(r"seconds|.*_seconds|time_.*_s|.*_per_s(_.*)?|tflops_per_rank|mfu|pipeline_bubble|peak_memory_.*_gb")

# How a value is computed from its parts. sum: the parts of microbatches and ranks are added; for a mean over tokens,
# each part is already divided by the global count. min, max, mean, quantile: over all tokens, samples or optimizer
# steps, as the metric's meaning says. last: the newest value.
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
        better: Whether higher or lower values are better; None if neither, or if it depends on the run.
        healthy: The values that it usually has in a run that learns; may be empty.
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


# Metrics of losses, rollouts and engines. Metrics of an evaluation are in `EVAL_METRICS`.
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
    """Return whether a metric is a time, a speed or an amount of memory. Others are equal in a repeated run."""
    return _COST.fullmatch(name) is not None


# A separate registry, because names such as "accuracy" mean something else in `METRICS` than in an evaluation.
EVAL_METRICS: Registry[Metric] = Registry("evaluation metric")

declare_metrics(
    Metric(
        "accuracy",
        "reward",
        "The mean reward of greedy answers to held-out problems, usually in [0, 1].",
        "mean",
        "higher",
    ),
    Metric(
        "reward",
        "reward",
        "The mean reward of greedy answers to held-out problems, if the run has `reward.functions`.",
        "mean",
        "higher",
        healthy="rises",
    ),
    Metric("nll_per_token", "nats", "−log p of held-out text, per predicted token.", "mean", "lower", healthy="falls"),
    Metric("nll_per_character", "nats", "−log p of held-out text, per character of plain text.", "mean", "lower"),
    Metric(
        "preference_accuracy",
        "1",
        "The share of held-out pairs whose chosen answer the model prefers; a tie counts half.",
        "mean",
        "higher",
    ),
    Metric(
        "preference_margin",
        "nats, or score",
        "How much the model prefers the chosen answer: by log-likelihood (language model) or by score (reward model).",
        "mean",
        "higher",
    ),
    Metric(
        "reward_accuracy",
        "1",
        "The share of held-out pairs whose chosen answer has the larger log π − log π_ref; a tie counts half.",
        "mean",
        "higher",
    ),
    Metric(
        "reward_margin", "nats", "log π − log π_ref of the chosen answer minus that of the rejected.", "mean", "higher"
    ),
    Metric(
        "label_accuracy",
        "1",
        "The share of held-out answers whose log π − log π_ref is above the reference point if they are desirable, and "
        "below it if they are not; a tie counts half.",
        "mean",
        "higher",
    ),
    registry=EVAL_METRICS,
)

# The statistics of a named set of `eval.sets`. A metric is called `<set>/<statistic>`, with numbers for n and k.
SET_METRICS: Registry[Metric] = Registry("statistic of an evaluation set")

declare_metrics(
    Metric("avg@n", "reward", "The mean reward of n samples of each problem.", "mean", "higher"),
    Metric(
        "pass@k",
        "1",
        "The unbiased estimate of the probability that at least one of k samples is right; for k = 1, 2, 4 … n. A "
        "sample with a reward of at least `right_from` is right.",
        "mean",
        "higher",
    ),
    Metric(
        "maj@n", "reward", "The reward of the most frequent answer, if the task can extract answers.", "mean", "higher"
    ),
    Metric("length", "tokens", "The mean number of tokens of a completion.", "mean", "lower"),
    Metric("truncated", "1", "The share of completions that ended without a stop token.", "mean", "lower"),
    registry=SET_METRICS,
)

# The direction of every eval metric that has one.
HIGHER_IS_BETTER: dict[str, bool] = {
    name: metric.better == "higher" for name, metric in EVAL_METRICS.items() if metric.better is not None
}

_OF_A_SET = re.compile(r"[\w.-]+/(?P<kind>avg(?=@)|pass(?=@)|maj(?=@)|length$|truncated$)(@[1-9][0-9]*)?")
_LETTERS = {"avg": "avg@n", "pass": "pass@k", "maj": "maj@n"}


def is_eval_metric(name: str) -> bool:
    """Return whether checkpoints can be ranked by this metric: an eval metric, or a statistic of a set."""
    return name in HIGHER_IS_BETTER or _parse_statistic(name) in SET_METRICS


def higher_is_better(name: str) -> bool:
    """Return whether higher is better for an eval metric, or for a statistic `<set>/<statistic>`."""
    if name in HIGHER_IS_BETTER:
        return HIGHER_IS_BETTER[name]
    return SET_METRICS[_parse_statistic(name)].better == "higher"


def _parse_statistic(name: str) -> str:
    """Return the declared name of a statistic, such as "avg@n" for "aime/avg@8", or "" for other names."""
    match = _OF_A_SET.fullmatch(name)
    return "" if match is None else _LETTERS.get(match["kind"], match["kind"])


def choose_shown_name(name: str, values: Iterable[float]) -> str:
    """Return the name that users see for an evaluation metric with these values.

    "accuracy" is the mean reward of held-out problems. It keeps this name only if all values are in [0, 1], so that
    they can be shares of right answers.
    """
    return "mean reward" if name == "accuracy" and not all(0 <= value <= 1 for value in values) else name


def is_better(name: str, value: float, than: float) -> bool:
    """Return whether `value` of the eval metric `name` is better than the value `than`.

    Any number is better than a NaN, and a NaN is never better.
    """
    if value != value or than != than:
        return than != than and value == value
    return value > than if higher_is_better(name) else value < than


def find_reached_goal(goals: Mapping[str, float], values: Mapping[str, float]) -> str | None:
    """Return the first eval metric in `goals` whose value is at least as good as its goal, or None."""
    for name, goal in goals.items():
        if name in values and values[name] == values[name] and not is_better(name, goal, values[name]):
            return name
    return None

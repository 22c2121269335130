"""Describe the metrics of reward functions, whose names depend on the functions of the run."""

from __future__ import annotations

from rl_megatron.config.metrics import Metric

# The names of these metrics have the label of a function, and what the function calls its own metrics.
OF_FUNCTIONS = (
    Metric("reward_<function>_score", "reward", "The mean score of the function, before its weight.", "mean"),
    Metric(
        "reward_<function>_<metric>",
        "the function's",
        "The mean of a metric that the function returns beside its score, over the samples for which it does.",
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

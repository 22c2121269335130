"""Statistics of an evaluation with several samples of each problem: avg@k, pass@k, maj@k, and their uncertainty.

Samples of one problem are alike, so they carry less information than samples of different problems. Every standard
error is therefore that of a mean over problems: it is clustered by problem. This module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_megatron.config.eval_sets import list_reported_ks

_CHANGE, _STANDARD_ERROR, _P_VALUE = "_change", "_se", "_p"
_MOST_TERMS, _PRECISION = 10_000, 1e-15  # of the continued fraction


@dataclass(frozen=True)
class ProblemSamples:
    """The samples of one problem.

    Attributes:
        rewards: The reward of each sample.
        lengths: The number of tokens of each completion.
        truncated: Whether each completion ended without a stop token.
        answers: The answer of each completion (None if it has no answer), or None if the task does not extract answers.
    """

    rewards: Sequence[float]
    lengths: Sequence[int]
    truncated: Sequence[bool]
    answers: Sequence[str | None] | None = None


@dataclass(frozen=True)
class Estimate:
    """A mean over problems, with its standard error, which is None if there is only one problem."""

    mean: float
    standard_error: float | None


@dataclass(frozen=True)
class Change:
    """The mean difference between two evaluations of the same problems, with its two-sided p-value."""

    mean: float
    standard_error: float
    p_value: float


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples is right.

    If c of n samples are right, this is the share of size-k subsets with a right sample: 1 − C(n − c, k) / C(n, k).

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.

    Raises:
        ValueError: k is not in 1 … num_samples, or num_right is not in 0 … num_samples.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples: k must be in 1 … {num_samples}")
    if not 0 <= num_right <= num_samples:
        raise ValueError(f"{num_right} of {num_samples} samples cannot be right")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(answers: Sequence[str | None], rewards: Sequence[float]) -> float:
    """Return the reward of the most frequent answer of a problem: maj@k, with k the number of samples.

    Samples without an answer do not vote. If several answers are equally frequent, the result is the expected reward
    of a fair draw between them. It is 0 if no sample has an answer.
    """
    votes: dict[str, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(reward)
    most = max(map(len, votes.values()), default=0)
    leading = [sum(rewards) / most for rewards in votes.values() if len(rewards) == most]
    return sum(leading) / len(leading) if leading else 0.0


def compute_problem_values(samples: ProblemSamples, right_from: float) -> dict[str, float]:
    """Return the statistics of one problem. Their means over all problems are the statistics of the set.

    Args:
        samples: The samples of the problem.
        right_from: The lowest reward of a right sample, for pass@k.
    """
    count = len(samples.rewards)
    if not count:
        raise ValueError("a problem needs at least one sample, got none")
    num_right = sum(reward >= right_from for reward in samples.rewards)
    values = {f"avg@{count}": sum(samples.rewards) / count}
    values |= {f"pass@{k}": pass_at_k(count, num_right, k) for k in list_reported_ks(count)}
    if samples.answers is not None:
        values[f"maj@{count}"] = majority(samples.answers, samples.rewards)
    return values | {"length": sum(samples.lengths) / count, "truncated": sum(map(bool, samples.truncated)) / count}


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per problem, with its standard error.

    If each value is a mean over its problem's samples, this standard error is clustered by problem. There must be at
    least one value.
    """
    count = len(values)
    if not count:
        raise ValueError("there is no value to estimate a mean from; an evaluation needs at least one problem")
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean, None)
    return Estimate(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count))


def paired_change(now: Sequence[float], start: Sequence[float]) -> Change | None:
    """Return the change of the mean over problems, given each problem's value now and at the start.

    A difference within one problem does not depend on how hard the problem is, so smaller changes can be detected. The
    p-value is that of a t-test; its degrees of freedom are the number of problems − 1. If all problems changed by the
    same amount, t is undefined. The p-value is then 1 if that amount is 0, and otherwise that of a test with random
    signs: 2 / 2^problems.

    Returns:
        The change, or None if there is only one problem.
    """
    differences = [new - old for new, old in zip(now, start, strict=True)]
    difference = estimate(differences)
    if difference.standard_error is None:
        return None
    if min(differences) == max(differences):
        return Change(difference.mean, 0.0, 1.0 if difference.mean == 0 else 2.0 ** (1 - len(differences)))
    p_value = two_sided_p_value(difference.mean / difference.standard_error, len(differences) - 1)
    return Change(difference.mean, difference.standard_error, p_value)


def compute_set_metrics(
    problems: Sequence[Mapping[str, float]], start: Sequence[Mapping[str, float]] | None = None
) -> dict[str, float]:
    """Return the metrics of a set: each statistic, its standard error and, with `start`, its change since then.

    Args:
        problems: What `compute_problem_values` returned for each problem.
        start: The same for the run's start.
    """
    if not problems:
        raise ValueError("an evaluation set needs at least one problem, got none")
    metrics: dict[str, float] = {}
    for name in problems[0]:
        now = [problem[name] for problem in problems]
        now_estimate = estimate(now)
        metrics[name] = now_estimate.mean
        if now_estimate.standard_error is not None:
            metrics[name + _STANDARD_ERROR] = now_estimate.standard_error
        change = None if start is None else paired_change(now, [problem[name] for problem in start])
        if change is not None:
            metrics[name + _CHANGE] = change.mean
            metrics[name + _CHANGE + _STANDARD_ERROR] = change.standard_error
            metrics[name + _CHANGE + _P_VALUE] = change.p_value
    return metrics


def two_sided_p_value(t: float, degrees_of_freedom: int) -> float:
    """Return the probability that Student's t is at least as far from 0 as `t`."""
    return _incomplete_beta(degrees_of_freedom / 2, 0.5, degrees_of_freedom / (degrees_of_freedom + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b).

    Source: Press et al. 2007, "Numerical Recipes", section 6.4: the continued fraction converges fast for
    x < (a + 1) / (a + b + 2), and I_x(a, b) = 1 − I_{1−x}(b, a) elsewhere.
    """
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, 1.0 - x)
    log_factor = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_factor) * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function, by the modified method of Lentz."""
    c, d = 1.0, 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1.0 / (1.0 + even * d), 1.0 + even / c
        value *= d * c
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1.0 / (1.0 + odd * d), 1.0 + odd / c
        value *= d * c
        if abs(d * c - 1.0) < _PRECISION:
            break
    return value

"""Statistics of evaluations: pass@k against all subsets, standard errors and p-values against simulated runs."""

import math
import random
from itertools import combinations
from statistics import mean, stdev

import pytest

from rl_megatron.config.eval_sets import list_statistics
from rl_megatron.evaluation.statistics import (
    ProblemSamples,
    compute_problem_values,
    compute_set_metrics,
    estimate,
    majority,
    paired_change,
    pass_at_k,
    two_sided_p_value,
)

PROBLEMS, SAMPLES, RUNS = 40, 6, 1000


def simulated(rng: random.Random, difficulty: list[float]) -> list[float]:
    """Return the mean reward of each problem over samples that are right with the problem's probability."""
    return [sum(rng.random() < p for _ in range(SAMPLES)) / SAMPLES for p in difficulty]


def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample():
    for n in range(1, 8):
        for right in range(n + 1):
            samples = [index < right for index in range(n)]
            for k in range(1, n + 1):
                subsets = [any(subset) for subset in combinations(samples, k)]
                assert pass_at_k(n, right, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased():
    p, n, k = 0.2, 10, 4
    expected = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1))
    assert expected == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(("n", "right", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_impossible_numbers(n, right, k):
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(n, right, k)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["4", "5", "5"], [1, 0, 0], 0.0),
        (["4", "5", "4"], [1, 0, 1], 1.0),
        (["4", "5"], [1, 0], 0.5),  # a tie
        (["4", None, None], [1, 0, 0], 1.0),  # those without an answer do not vote
        ([None, None], [0, 0], 0.0),
        (["4", "4"], [1, 0.5], 0.75),  # the same answer scored differently
    ],
)
def test_the_most_frequent_answer_decides_the_majority(answers, rewards, expected):
    assert majority(answers, rewards) == expected


def test_the_statistics_of_a_problem():
    samples = ProblemSamples([1.0, 0.0, 1.0, 0.25], [3, 5, 4, 8], [False, False, False, True], ["7", "8", "7", None])
    values = compute_problem_values(samples, right_from=1.0)
    assert values == {
        "avg@4": 0.5625, "pass@1": 0.5, "pass@2": pytest.approx(5 / 6), "pass@4": 1.0, "maj@4": 1.0,
        "length": 5.0, "truncated": 0.25,
    }  # fmt: skip
    assert tuple(values) == list_statistics(4, has_answers=True)
    without = ProblemSamples(samples.rewards, samples.lengths, samples.truncated)
    assert tuple(compute_problem_values(without, right_from=1.0)) == list_statistics(4, has_answers=False)
    assert compute_problem_values(without, right_from=0.25)["pass@1"] == 0.75


def test_intervals_of_the_standard_error_cover_the_true_mean():
    """Problems are drawn with different difficulties; an error that ignores this covers the mean far too seldom."""
    rng, covered, naive = random.Random(0), 0, 0
    for _ in range(RUNS):
        found = simulated(rng, [rng.betavariate(0.5, 0.5) for _ in range(PROBLEMS)])
        result = estimate(found)
        assert result.standard_error is not None
        covered += abs(result.mean - 0.5) < 1.96 * result.standard_error
        unclustered = math.sqrt(result.mean * (1 - result.mean) / (PROBLEMS * SAMPLES))
        naive += abs(result.mean - 0.5) < 1.96 * unclustered
    assert 0.93 < covered / RUNS < 0.965
    assert naive / RUNS < 0.75


def test_the_standard_error_of_a_mean():
    values = [0.0, 1.0, 0.5, 0.25]
    assert estimate(values).mean == mean(values)
    assert estimate(values).standard_error == pytest.approx(stdev(values) / 2)
    assert estimate([0.3]).standard_error is None


def test_p_values_of_no_change_are_uniform_and_those_of_a_change_are_small():
    rng, p_values, powers = random.Random(1), [], []
    for _ in range(RUNS):
        difficulty = [rng.betavariate(0.5, 0.5) for _ in range(PROBLEMS)]
        start = simulated(rng, difficulty)
        same = paired_change(simulated(rng, difficulty), start)
        better = paired_change(simulated(rng, [p + 0.4 * (1 - p) for p in difficulty]), start)
        assert same is not None and better is not None
        p_values.append(same.p_value)
        powers.append(better.p_value < 0.05)
    for level in (0.05, 0.2, 0.5):
        share = sum(p < level for p in p_values) / RUNS
        assert abs(share - level) < 3.5 * math.sqrt(level * (1 - level) / RUNS)
    assert mean(powers) > 0.95


def test_pairs_show_a_change_that_is_smaller_than_the_error_of_either_mean():
    start = [0.0, 1.0] * 20
    now = [value * 0.9 + 0.05 + 0.02 * (index % 3) for index, value in enumerate(start)]
    change = paired_change([value + 0.05 for value in now], start)
    error = estimate(start).standard_error
    assert change is not None and error is not None
    assert change.p_value < 1e-6 and change.mean < 1.96 * error


def test_equal_differences_have_the_p_value_of_random_signs():
    unchanged = paired_change([0.5, 1.0, 0.0], [0.5, 1.0, 0.0])
    assert unchanged is not None and (unchanged.mean, unchanged.standard_error, unchanged.p_value) == (0.0, 0.0, 1.0)
    all_alike = paired_change([1.0] * 5, [0.0] * 5)
    assert all_alike is not None and (all_alike.mean, all_alike.p_value) == (1.0, 2 / 2**5)
    assert paired_change([1.0], [0.0]) is None


@pytest.mark.parametrize(
    ("t", "degrees", "p"),
    # From tables of Student's t. With one degree it is Cauchy: p = 1 − 2 atan(t) / π; with two, 1 − t / sqrt(2 + t²).
    [(2.262157, 9, 0.05), (1.0, 1, 0.5), (12.7062, 1, 0.05), (0.0, 5, 1.0), (1.959964, 10**6, 0.05),
     (-2.756386, 29, 0.01), (3.0, 2, 1 - 3 / math.sqrt(11))],
)  # fmt: skip
def test_p_values_are_those_of_students_t(t, degrees, p):
    assert two_sided_p_value(t, degrees) == pytest.approx(p, rel=1e-4)


def test_the_metrics_of_a_set_have_errors_and_changes_since_the_start():
    now, start = [{"avg@1": 1.0}, {"avg@1": 0.5}], [{"avg@1": 0.0}, {"avg@1": 0.5}]
    assert compute_set_metrics(now) == {"avg@1": 0.75, "avg@1_se": 0.25}
    assert compute_set_metrics(now, start) == {
        "avg@1": 0.75, "avg@1_se": 0.25, "avg@1_change": 0.5, "avg@1_change_se": 0.5,
        "avg@1_change_p": pytest.approx(0.5),
    }  # fmt: skip
    assert compute_set_metrics(now[:1], start[:1]) == {"avg@1": 1.0}

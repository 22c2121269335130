"""Reward functions may return numbers and mappings with a score; everything else is refused."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rl_megatron.rewards.reward_function import BadResult, Score, read_result, read_results


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0), (0.5, 0.5), (True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (np.bool_(True), 1.0),
        (torch.tensor(2.0), 2.0), (np.array([3]), 3.0), (Decimal("0.25"), 0.25), (Fraction(1, 4), 0.25),
        ({"score": np.int64(2)}, 2.0),
    ],
)  # fmt: skip
def test_a_number_of_any_kind_is_a_score(result, value):
    assert read_result(result) == Score(value, {})


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (None, "returned None, which is not a number"), ("1.0", "returned str '1.0', which is not a number"),
        (float("nan"), "returned nan; a reward must be finite"), (float("-inf"), "-inf; a reward must be finite"),
        (10**400, "inf; a reward must be finite"), ([1.0], r"returned list \[1.0\]"), (1j, "returned complex"),
        (torch.zeros(2), "returned Tensor"), ({"acc": 1.0}, "a mapping without 'score': its keys are \\['acc'\\]"),
        ({"score": None}, "returned None"), ({"score": 1.0, "errors": 2}, "'errors', which is a name of this package"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(result, words):
    with pytest.raises(BadResult, match=words):
        read_result(result)


def test_metrics_are_the_numbers_beside_the_score():
    result = {"score": 1, "tokens": np.int64(3), "right": True, "text": "x", "none": None, "nan": float("nan")}
    assert read_result(result) == Score(1.0, {"tokens": 3.0, "right": 1.0})


def test_a_list_has_a_reward_or_none_for_each_sample():
    assert read_results([1, None, {"score": 2, "x": 3}], 3) == [Score(1.0, {}), Score(None, {}), Score(2.0, {"x": 3.0})]
    assert read_results(torch.tensor([1.0, 0.0]), 2) == [Score(1.0, {}), Score(0.0, {})]
    for result, words in ((None, "must return a list"), (1.0, "must return a list"), ([1.0], "1 rewards for 2 comp")):
        with pytest.raises(BadResult, match=words):
            read_results(result, 2)

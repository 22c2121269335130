"""Declarations of metrics: which are complete, and that a name has one meaning."""

import pytest

from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.metrics import EVAL_METRICS, HIGHER_IS_BETTER, Metric, declare_metrics


@pytest.fixture
def registry():
    return Registry("metric")


def test_a_metric_is_found_by_its_name(registry):
    tokens = Metric("tokens", "tokens", "Tokens.", "sum")
    assert declare_metrics(tokens, registry=registry) == (tokens,)
    assert registry["tokens"] is tokens


def test_a_name_has_one_meaning(registry):
    declare_metrics(Metric("tokens", "tokens", "Tokens.", "sum"), registry=registry)
    declare_metrics(Metric("tokens", "tokens", "Tokens.", "sum"), registry=registry)  # of a module imported twice
    with pytest.raises(ValueError, match="metric 'tokens' is registered already"):
        declare_metrics(Metric("tokens", "tokens", "Tokens of a sequence.", "mean"), registry=registry)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"reduction": "average"}, "reduction='average'"),
        ({"better": "up"}, "better='up'"),
        ({"unit": ""}, "unit"),
        ({"meaning": ""}, "meaning"),
    ],
)
def test_an_incomplete_declaration_is_refused(wrong, named):
    with pytest.raises(ValueError, match=f"metric 'tokens'.*{named}"):
        Metric(**{"name": "tokens", "unit": "tokens", "meaning": "Tokens.", "reduction": "sum"} | wrong)


def test_the_direction_of_eval_metrics_follows_from_their_declarations():
    assert HIGHER_IS_BETTER == {
        "accuracy": True, "nll_per_token": False, "nll_per_character": False, "preference_accuracy": True,
        "preference_margin": True, "reward": True, "reward_accuracy": True, "reward_margin": True,
            "label_accuracy": True,
    }  # fmt: skip
    assert HIGHER_IS_BETTER.keys() == EVAL_METRICS.keys()

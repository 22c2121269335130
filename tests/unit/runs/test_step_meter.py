"""The times of a step as metrics: the parts add up, and parts of training have keys of their own."""

import pytest

from rl_megatron.config.metrics import METRICS, is_cost
from rl_megatron.observability.cost_metrics import COSTS
from rl_megatron.runs.step_meter import time_metrics
from rl_megatron.timing import StepTimes

TIMES = StepTimes(
    {
        (): 1.0, ("generate",): 2.0, ("evaluate",): 4.0, ("evaluate", "generate"): 8.0, ("train",): 16.0,
        ("train", "forward"): 32.0, ("train", "optimizer"): 64.0, ("train", "optimizer", "collectives"): 128.0,
        ("mine",): 256.0,
    }
)  # fmt: skip


def test_phases_add_up_to_the_step_and_parts_of_training_to_training():
    assert time_metrics(TIMES) == {
        "time_step_s": 511.0, "time_generate_s": 2.0, "time_evaluate_s": 12.0, "time_train_s": 240.0,
        "time_mine_s": 256.0, "time_other_s": 1.0, "time_train_forward_s": 32.0, "time_train_optimizer_s": 64.0,
        "time_train_collectives_s": 128.0, "time_train_other_s": 16.0,
    }  # fmt: skip


def test_costs_are_known_by_their_names():
    assert all(is_cost(metric.name) for metric in COSTS)
    results = ("loss", "reward", "completion_tokens", "grad_norm", "gate_mean", "refit_bytes", "step", "lr", "stopped")
    assert not any(map(is_cost, results)) and {"loss", "reward", "gate_mean"} <= set(METRICS)


@pytest.mark.parametrize("name", ["seconds", "refit_seconds", "refit_gb_per_s", "time_mine_s"])
def test_other_times_and_rates_are_costs_as_well(name):
    assert is_cost(name)

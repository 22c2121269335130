"""Values that ranks hold in parts are reduced exactly. tests/parallel/test_sharded_algorithms.py does it over ranks."""

import pytest
import torch

from rl_megatron.topology.reductions import ALONE


def test_order_statistics_are_those_of_sorted_values():
    values = torch.randn(1001, generator=torch.Generator().manual_seed(0)) * 1e3
    values[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-40, -1e-40])
    ordered, places = values.sort().values, [0, 1, 500, 501, 900, 1000]
    assert ALONE.order_statistics(values, places) == ordered[places].tolist()


def test_order_statistics_count_values_by_their_weights():
    values, weights = torch.tensor([3.0, -1.0, 2.0]), torch.tensor([2, 3, 1])
    repeated = values.repeat_interleave(weights).sort().values
    assert ALONE.order_statistics(values, list(range(6)), weights) == repeated.tolist()


def test_moments_and_extremes():
    values = torch.tensor([1.0, 2.0, 6.0])
    assert ALONE.moments(values) == (3, 3.0, pytest.approx(values.std(correction=0).item()), 1.0, 6.0)
    assert ALONE.moments(values, correction=1).deviation == pytest.approx(values.std().item())
    assert ALONE.moments(values[:0]) == (0, 0.0, 0.0, torch.inf, -torch.inf)

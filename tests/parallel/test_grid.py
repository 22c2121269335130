"""Layouts give the results of one process with every standard loss: loss, logprobs, gradients, a step and metrics.

The change tier has a few layouts, which have every value of every factor on up to four ranks. This runs all layouts of
docs/layouts.md:

    scripts/test.sh tests/parallel/test_grid.py --tier nightly
"""

from __future__ import annotations

import pytest

from docs import generate_layouts
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.step_microbatches import plan_step
from rl_megatron.certify.workload import VOCAB_SIZE
from rl_megatron.topology.degrees import ConfiguredLayout
from tests.parallel.grid import VALUES, Factors, Grid, Layout, is_possible, pairs, possible_pairs, whole_grid

# The values are in the order of `Factors`.
FEW = [
    Layout(Factors(*values))
    for values in (
        (1, False, 4, 1, 1, 0, 1, 1, 1, "packed", True, "none", True, None, True, True, True, False),
        (2, True, 1, 1, 2, 2, 2, 1, 2, "packed", False, "full", False, 5, False, False, True, True),
        (1, False, 2, 2, 1, 1, 1, 2, 1, "dynamic", True, "selective", True, None, True, True, False, True),
        (4, False, 1, 1, 1, 0, 1, 1, 4, "padded", True, "none", False, 5, False, True, True, False),
        (1, False, 1, 1, 4, 0, 1, 1, 2, "packed", True, "selective", False, None, True, False, False, True),
    )
]


QUICK = FEW[1:3]  # together they use every kind of parallelism with degree 2, on four ranks each


# Parameters for tests of what the grid has shown for the policy itself.
QUICK_OF_FEW = [
    pytest.param(layout, marks=() if layout in QUICK else pytest.mark.nightly, id=layout.name.replace(" ", "-"))
    for layout in FEW
]


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        layouts = whole_grid() if metafunc.config.getoption("--tier") == "nightly" else FEW
        metafunc.parametrize(
            "layout",
            [pytest.param(layout, marks=() if layout in QUICK else pytest.mark.nightly) for layout in layouts],
            ids=lambda layout: layout.name.replace(" ", "-"),
        )


@pytest.fixture(scope="module")
def grid(ranks):
    return Grid(ranks)


def test_a_layout_gives_what_one_process_gives(grid, layout):
    assert not grid.run(layout).failures


@pytest.mark.fast
def test_the_quick_layouts_use_every_kind_of_parallelism():
    assert all(layout.factors.ranks == 4 for layout in QUICK)
    for axis in ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data"):
        assert 2 in {getattr(layout.factors, axis) for layout in QUICK}, axis
    assert any(layout.factors.sequence for layout in QUICK)
    assert {layout.factors.batching for layout in QUICK} == {"packed", "dynamic"}
    for setting in ("distributed_optimizer", "overlap", "fused_head", "tied"):
        assert {getattr(layout.factors, setting) for layout in QUICK} == {False, True}, setting


@pytest.mark.fast
def test_the_few_layouts_have_every_value_of_every_factor():
    assert all(is_possible(layout.factors) and layout.factors.ranks <= 4 for layout in FEW)
    for place, (factor, values) in enumerate(VALUES.items()):
        assert {layout.factors[place] for layout in FEW} == set(values), factor


@pytest.mark.fast
def test_layouts_with_shared_prefixes_have_trees():
    for layout in whole_grid() + FEW:
        batch = Batch.from_whole(layout.workload().batch())
        where = ConfiguredLayout.from_config(layout.parallel, layout.factors.ranks)
        cost = SequenceCost.from_model(layout.model, VOCAB_SIZE)
        for group_size in (1, 2):
            step = plan_step(batch, 0, batch.size, layout.batching(group_size), where, 0, group_size, cost)
            assert step.local.shares_prefixes == layout.factors.shared, layout.name


def test_the_grid_has_every_pair_of_values_that_eight_ranks_allow():
    layouts = whole_grid()
    assert all(is_possible(layout.factors) for layout in layouts)
    assert set().union(*(pairs(layout.factors) for layout in layouts)) == possible_pairs()
    assert set(Factors._fields) == set(VALUES)


def test_the_page_has_every_layout_of_the_grid():
    page = generate_layouts.PAGE.read_text()
    names = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.startswith("| ")][1:]
    assert names == [layout.name for layout in whole_grid()], "run `python docs/generate_layouts.py`"

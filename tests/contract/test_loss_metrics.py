"""Every metric that a registered loss can return is declared, and combines as it is declared."""

import pytest

from rl_megatron.config.metrics import METRICS
from rl_megatron.losses import build_loss
from rl_megatron.losses import metrics as declared
from rl_megatron.losses.draft import DraftLossWrapper
from tests.contract.loss_cases import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_metric_of_a_loss_is_declared_with_its_reduction(case):
    reductions = build_loss(case.name, case.cfg).metric_reductions
    assert reductions
    assert {name: METRICS[name].reduction for name in reductions} == {
        name: reduction.value for name, reduction in reductions.items()
    }


def test_the_metric_of_a_draft_beside_a_policys_loss_is_declared():
    wrapper = DraftLossWrapper(build_loss("nll"))
    assert wrapper.metric_reductions.keys() <= METRICS.keys()


def test_nothing_is_declared_that_no_loss_returns():
    groups = (declared.COMMON, declared.NLL, declared.CLIPPED_PG, declared.MISMATCH, declared.PREFERENCE,
              declared.VALUE, declared.DISTILLATION)  # fmt: skip
    returned = {name for case in CASES for name in build_loss(case.name, case.cfg).metric_reductions} | {"draft_loss"}
    assert {metric.name for group in groups for metric in group} == returned

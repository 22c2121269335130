"""Which optimizer steps a policy skips, and when it gives up."""

import pytest

from rl_megatron.training.metrics import NonFiniteLoss
from rl_megatron.training.skipped_steps import SkippedSteps, counts


def failing():
    raise NonFiniteLoss("the loss is nan")


def updating():
    return {"loss": 1.0, "updated": 1.0}


def without_tokens():
    return {"loss": 0.0, "updated": 0.0}


def test_without_an_allowance_the_first_step_fails_and_reports_stay_as_they_are():
    skipped = SkippedSteps(0)
    assert skipped.take(updating, lr=0.1) == updating()
    with pytest.raises(NonFiniteLoss, match=r"^the loss is nan$"):
        skipped.take(failing, lr=0.1)


def test_so_many_steps_in_a_row_are_skipped(logged):
    skipped = SkippedSteps(2)
    for _ in range(2):
        assert skipped.take(failing, lr=0.1) == {"lr": 0.1, "updated": 0.0, "skipped_steps": 1.0}
    assert len(logged) == 2 and "an optimizer step is skipped" in logged[0] and "the loss is nan" in logged[0]
    with pytest.raises(NonFiniteLoss, match=r"2 optimizer steps before were skipped.*train\.max_nonfinite_steps"):
        skipped.take(failing, lr=0.1)


def test_only_an_update_begins_a_new_row():
    skipped = SkippedSteps(2)
    for step in (failing, without_tokens, failing, updating, failing, failing):
        skipped.take(step, lr=0.1)
    with pytest.raises(NonFiniteLoss):
        skipped.take(failing, lr=0.1)


def test_steps_are_counted_over_a_call():
    skipped = SkippedSteps(1)
    reports = [skipped.take(step, lr=0.1) for step in (updating, failing, updating)]
    assert counts(reports) == {"num_updates": 2, "skipped_steps": 1}
    assert counts([updating()]) == {"num_updates": 1}

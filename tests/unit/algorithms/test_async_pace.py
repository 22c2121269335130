"""A bound on ages that does not suit the engine's speed is said after a few steps, once, with the remedy that helps."""

import pytest

from rl_megatron.algorithms.async_pace import AsyncPace


def said(steps, max_age=1, per_step=4):
    """Return what is said at each step that has (trainer_idle, engine_idle, dropped_groups_too_old)."""
    pace = AsyncPace(max_age, per_step)
    names = ("trainer_idle", "engine_idle", "dropped_groups_too_old")
    return [pace.note(dict(zip(names, step, strict=True))) for step in steps]


def test_training_that_waits_for_a_busy_engine_is_told_to_use_more_engines():
    *before, (warning,) = said([(0.75, 0.0, 0)] * 5)
    assert before == [[]] * 4
    assert warning == (
        "rollout.max_trajectory_age_steps=1: training waited for trajectories for 75% of the last 5 steps, because "
        "those of a step take 4.0 times as long as training on them. The engine was busy, so a higher bound does not "
        "help: use more engines, or shorter completions"
    )


def test_an_engine_that_the_bound_holds_back_is_told_to_raise_it():
    (warning,) = said([(0.6, 0.4, 0)] * 5)[-1]
    assert "no request for 40% of that time" in warning and warning.endswith("raise the bound")


def test_groups_that_are_always_dropped_are_said():
    (warning,) = said([(0.0, 0.0, 2)] * 5, max_age=2)[-1]
    assert "max_trajectory_age_steps=2: 10 of 30 groups" in warning and "rollout.over_sampling=1" in warning


@pytest.mark.parametrize("step", [(0.5, 0.0, 0), (0.1, 0.9, 0), (0.0, 0.0, 1)])
def test_a_bound_that_suits_the_engine_is_not_said(step):
    assert said([step] * 20) == [[]] * 20


def test_a_warning_is_said_once_and_a_step_without_time_before_it_does_not_count():
    pace = AsyncPace(1, 4)
    assert pace.note({"engine_idle": 0.0, "dropped_groups_too_old": 9}) == []
    slow = {"trainer_idle": 0.9, "engine_idle": 0.0, "dropped_groups_too_old": 9.0}
    assert [len(pace.note(slow)) for _ in range(9)] == [0, 0, 0, 0, 2, 0, 0, 0, 0]

"""The timer of the phases of a training loop."""

import pytest

from rl_megatron.observability.phase_timer import PhaseTime, PhaseTimer


class Clock:
    """A clock that stands still until it is moved."""

    now = 100.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timer(clock):
    return PhaseTimer(clock)


def test_seconds_and_counts_add_up_by_phase(clock, timer):
    for seconds in (1.0, 2.0):
        with timer.phase("train"):
            clock.pass_by(seconds)
        clock.pass_by(50.0)
    with timer.phase("save"):
        clock.pass_by(4.0)
    assert timer.collect() == {"train": PhaseTime(3.0, 2), "save": PhaseTime(4.0, 1)}


def test_collecting_resets_the_timer(clock, timer):
    with timer.phase("train"):
        clock.pass_by(1.0)
    timer.collect()
    assert timer.collect() == {}


def test_a_phase_includes_the_phases_within_it(clock, timer):
    with timer.phase("rollout"):
        clock.pass_by(1.0)
        with timer.phase("logprobs"):
            clock.pass_by(2.0)
        clock.pass_by(4.0)
    assert timer.collect() == {"logprobs": PhaseTime(2.0, 1), "rollout": PhaseTime(7.0, 1)}


def test_a_phase_within_itself_is_not_counted_twice(clock, timer):
    with timer.phase("train"):
        clock.pass_by(1.0)
        with timer.phase("train"):
            clock.pass_by(2.0)
        clock.pass_by(4.0)
    assert timer.collect() == {"train": PhaseTime(7.0, 1)}


def test_a_phase_that_raises_ends_and_is_timed(clock, timer):
    for _ in range(2):
        with pytest.raises(KeyError), timer.phase("train"):
            clock.pass_by(1.0)
            raise KeyError
    assert timer.collect() == {"train": PhaseTime(2.0, 2)}


def test_a_phase_that_still_runs_is_collected_when_it_ends(clock, timer):
    with timer.phase("train"):
        clock.pass_by(1.0)
        assert timer.collect() == {}
        clock.pass_by(1.0)
    assert timer.collect() == {"train": PhaseTime(2.0, 1)}


def test_the_default_clock_runs_forward():
    timer = PhaseTimer()
    with timer.phase("train"):
        pass
    (time,) = timer.collect().values()
    assert time.seconds >= 0 and time.count == 1


def test_an_observer_hears_of_the_innermost_phase():
    heard = []
    timer = PhaseTimer(observer=heard.append)
    with timer.phase("rollout"):
        with timer.phase("score"), timer.phase("rollout"):
            pass
    with timer.phase("train"):
        pass
    assert heard == ["rollout", "score", "rollout", None, "train", None]

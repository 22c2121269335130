"""The timer of the phases of a step: nothing is lost, nothing counts twice, and nobody waits for a GPU."""

import pytest

from rl_megatron.timing import PhaseTimer, phase, use_timer


class Clock:
    """A clock that stands still until it is moved. It tells times up to `reached`, as a GPU that is behind."""

    now = 100.0
    reached = float("inf")

    def mark(self):
        return self.now

    def seconds(self, began, ended):
        return ended - began if ended <= self.reached else None

    def pass_by(self, seconds):
        self.now += seconds


class Memory:
    """A meter whose next peaks are given."""

    def __init__(self):
        self.next = []

    def take_peak(self):
        return self.next.pop(0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timer(clock):
    return PhaseTimer(clock)


def test_every_moment_belongs_to_the_innermost_phase(clock, timer):
    clock.pass_by(1.0)
    with timer.phase("train"):
        clock.pass_by(2.0)
        for seconds in (4.0, 8.0):
            with timer.phase("forward"):
                clock.pass_by(seconds)
        with timer.phase("optimizer"), timer.phase("communication"):
            clock.pass_by(16.0)
    clock.pass_by(32.0)
    times = timer.collect()
    assert times.seconds == {
        (): 33.0, ("train",): 2.0, ("train", "forward"): 12.0, ("train", "optimizer", "communication"): 16.0,
        ("train", "optimizer"): 0.0,
    }  # fmt: skip
    assert times.total == 63.0 and times.sum_phase("train") == 30.0
    assert times.split_phase("train") == {"forward": 12.0, "communication": 16.0, "optimizer": 0.0}


def test_collecting_begins_anew_within_a_phase(clock, timer):
    with timer.phase("train"):
        clock.pass_by(1.0)
        assert timer.collect().seconds == {(): 0.0, ("train",): 1.0}
        clock.pass_by(2.0)
    assert timer.collect().seconds == {("train",): 2.0, (): 0.0}


def test_restarting_forgets(clock, timer):
    with timer.phase("train"):
        clock.pass_by(1.0)
    timer.restart()
    clock.pass_by(2.0)
    assert timer.collect().seconds == {(): 2.0}


def test_a_phase_within_itself_is_not_entered_again(clock, timer):
    with timer.phase("train"), timer.phase("train"):
        clock.pass_by(1.0)
    assert timer.collect().seconds == {(): 0.0, ("train",): 1.0}


def test_a_phase_that_raises_ends_and_is_timed(clock, timer):
    with pytest.raises(KeyError), timer.phase("train"), timer.phase("forward"):
        clock.pass_by(1.0)
        raise KeyError
    clock.pass_by(2.0)
    assert timer.collect().seconds == {(): 2.0, ("train",): 0.0, ("train", "forward"): 1.0}


def test_ending_a_phase_ends_those_within_it(clock, timer):
    outer = timer.begin("train")
    timer.begin("forward")
    timer.end(outer)
    clock.pass_by(2.0)
    assert timer.collect().seconds[()] == 2.0


def test_what_a_gpu_has_not_done_counts_in_the_next_step(clock, timer):
    with timer.phase("train"):
        clock.pass_by(1.0)
        with timer.phase("optimizer"):
            clock.pass_by(2.0)
    clock.reached = 102.0
    assert timer.collect().seconds == {(): 0.0, ("train",): 1.0}
    clock.pass_by(4.0)
    clock.reached = 107.0
    assert timer.collect().seconds == {("train", "optimizer"): 2.0, ("train",): 0.0, (): 4.0}


def test_memory_is_that_of_outermost_phases(clock):
    memory = Memory()
    timer = PhaseTimer(clock, memory)
    memory.next = [7, 3, 50, 5]
    for _ in range(2):
        with timer.phase("train"), timer.phase("forward"):
            pass
    assert timer.collect().peak_bytes == {"train": 5}
    assert timer.collect().peak_bytes == {}


def test_an_observer_hears_of_the_outermost_phase():
    heard = []
    timer = PhaseTimer(observer=heard.append)
    with timer.phase("generate"), timer.phase("reward"), timer.phase("generate"):
        pass
    with timer.phase("train"):
        pass
    with pytest.raises(KeyError), timer.phase("save"):
        raise KeyError
    assert heard == ["generate", None, "train", None, "save"]


def test_phases_are_timed_by_the_timer_in_use(clock, timer):
    with phase("train"):
        clock.pass_by(1.0)
    timer.restart()
    with use_timer(timer), phase("train"):
        clock.pass_by(2.0)
    assert timer.collect().sum_phase("train") == 2.0

"""When a run ends early: after a signal, and before a step that might not be saved in time."""

import signal

import pytest

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.loading.load import load_config
from rl_megatron.config.train import parse_duration
from rl_megatron.runs.stop_signals import StopSignals
from rl_megatron.runs.stopping import SLURM_END, Stopping


class Clock:
    """Seconds since 1970, which a test sets."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_step_is_begun_only_if_it_and_its_save_can_end_before_the_limit():
    clock = Clock()
    stopping = Stopping(save_by="00:00:10:00", environment={}, clock=clock)
    stopping.begin_step()
    clock.now += 100
    assert stopping.reason() is None, "500 s are left for a step of 100 s and a save that was never measured"
    stopping.record_save(150.0)
    clock.now += 50
    assert stopping.reason() is None, "450 s are left for the longest step and the longest save, 250 s"
    clock.now += 210
    assert "checkpoint_must_save_by=00:00:10:00" in str(stopping.reason()), "240 s are left for a step of 210 s"


def test_the_end_of_a_slurm_job_leaves_time_to_end_the_job():
    clock = Clock()
    stopping = Stopping(environment={SLURM_END: "2000"}, clock=clock)
    stopping.record_save(20.0)
    stopping.begin_step()
    clock.now = 1900.0
    stopping.begin_step()
    clock.now = 1924.0
    assert stopping.reason() is None, "the step took 24 s, the save 20 s, and the job's end 30 s"
    clock.now = 1928.0
    assert "the SLURM job's time limit" in str(stopping.reason())


@pytest.mark.parametrize(
    ("keys", "environment", "limit"),
    [
        ({"save_by": "00:00:00:50"}, {}, "train.checkpoint_must_save_by=00:00:00:50"),
        ({}, {SLURM_END: "1080"}, "the SLURM job's time limit"),
    ],
)
def test_a_limit_that_leaves_no_time_for_a_first_step_is_refused(keys, environment, limit):
    """Otherwise a job that is queued again would end at once, again and again."""
    stopping = Stopping(**keys, environment=environment, clock=Clock())
    with pytest.raises(
        ConfigError, match=rf"^{limit} leaves no time for a step and its save \(60 s, of which 60 s are"
    ):
        stopping.reason()
    stopping.begin_step()
    assert limit in str(stopping.reason()), "a run that has made progress is saved and ends"


def test_a_step_is_saved_when_the_last_checkpoint_is_old():
    clock = Clock()
    stopping = Stopping(environment={}, clock=clock)
    stopping.begin_stage(60.0)
    for seconds, is_due in ((59, False), (1, True), (30, True)):
        clock.now += seconds
        assert stopping.reason() is None and stopping.is_save_due == is_due
    stopping.note_save()
    assert not stopping.is_save_due
    clock.now += 59
    assert stopping.reason() is None and not stopping.is_save_due
    stopping.begin_stage(0.0)
    clock.now += 1e6
    assert stopping.reason() is None and not stopping.is_save_due, "the stage saves by steps"


def test_a_signal_is_kept_and_the_handlers_are_put_back():
    before = signal.getsignal(signal.SIGUSR1)
    with StopSignals() as signals:
        stopping = Stopping(signals, environment={})
        assert stopping.reason() is None
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)  # within two seconds: a launcher sends on what all processes got
        assert stopping.reason() == "SIGUSR1 was received"
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize("value", ["3:45:00", "00:03:45", "soon"])
def test_a_duration_is_days_hours_minutes_and_seconds(value):
    assert parse_duration("01:02:03:04") == 86400 + 2 * 3600 + 3 * 60 + 4
    with pytest.raises(ConfigError, match="checkpoint_must_save_by.*DD:HH:MM:SS"):
        load_config([f"train.checkpoint_must_save_by='{value}'"])

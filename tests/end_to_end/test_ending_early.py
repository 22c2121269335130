"""Signals and time limits end a run early: it is saved, says how to go on, and goes on from that very step."""

import json
import os
import random
import signal
import time

import pytest

from tests.end_to_end.launch import INTERRUPTED, checkpoints, metrics

STOPPED = 75
# A save takes longer than the 30 s that torchrun's agent gives ranks after its own signal.
SLOW_SAVE = """
import time
from pathlib import Path
from rl_megatron.checkpoint.save import Save

def finish(self, before=Save.finish):
    if self.path.name == "step-000002":
        Path("saving").touch()
        time.sleep(33)
    return before(self)

Save.finish = finish
"""


def steps_of(directory):
    return [line["step"] for line in metrics(directory / "out") if line["kind"] == "train"]


def test_a_signal_to_one_rank_saves_the_step_on_all_ranks_and_the_run_goes_on_from_it(tmp_path, forks, whole):
    last = random.Random(str(tmp_path)).randint(1, 6)
    with forks.start(tmp_path, *INTERRUPTED, ranks=2) as running:
        running.wait_until(lambda: len(steps_of(tmp_path)) >= last, f"step {last}")
        os.kill(running.pids[1], signal.SIGUSR1)
        ended = running.finish_ranks()
    assert [rank.status for rank in ended] == [STOPPED] * 2, ended
    step = steps_of(tmp_path)[-1]
    assert last <= step < 8 and checkpoints(tmp_path / "out", "grpo") == [f"step-{step:06d}"]
    assert f"stopped after step {step} of 8, because SIGUSR1 was received; the same command" in ended[0].err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stopped"] == {"stage": "grpo", "step": step} and (tmp_path / "out" / "curves.png").is_file()
    done = forks.run_ranks(tmp_path, *INTERRUPTED, ranks=2)
    assert [rank.status for rank in done] == [0, 0], done
    assert f"resuming after step {step} of 8" in done[0].err
    assert metrics(tmp_path / "out") == whole
    assert "stopped" not in json.loads((tmp_path / "out" / "summary.json").read_text())


@pytest.mark.change
def test_a_signal_to_the_launcher_during_a_save_of_half_a_minute_waits_for_the_save(tmp_path, forks, whole):
    (tmp_path / "slow_save.py").write_text(SLOW_SAVE)
    slow = (*INTERRUPTED, "train.save_every=2", "plugins=[slow_save]")
    with forks.launch(tmp_path, *slow, ranks=2, restarts=2) as running:
        running.wait_until((tmp_path / "saving").exists, "the save")
        running.signal(signal.SIGTERM)
        ended = running.finish()
    assert ended.status == STOPPED, ended.err
    assert ended.err.count("2 rank(s): tensor 2") == 1, "ranks that were asked to end are not started again"
    step = steps_of(tmp_path)[-1]
    assert checkpoints(tmp_path / "out", "grpo")[-1] == f"step-{step:06d}"
    assert ended.err.strip().splitlines()[-1].endswith("the same command continues the run (exit status 75)")
    with forks.launch(tmp_path, *slow, ranks=2) as again:
        assert (finished := again.finish()).status == 0, finished.err
    assert metrics(tmp_path / "out") == whole


def test_a_second_signal_ends_the_run_at_once(tmp_path, forks):
    with forks.start(tmp_path, *INTERRUPTED[:-1], before=_slow_training) as running:
        running.wait_until((tmp_path / "in_step").exists, "the first step")
        os.kill(running.pids[0], signal.SIGINT)
        time.sleep(2.5)  # a second signal within 2 s is the same one, sent on by a launcher
        assert running.is_running
        os.kill(running.pids[0], signal.SIGINT)
        assert running.finish().status == -signal.SIGINT


def _slow_training() -> None:
    from pathlib import Path

    from rl_megatron.training.megatron_policy import MegatronPolicy

    def train(self, *arguments, **keywords):
        Path("in_step").touch()
        time.sleep(600)

    MegatronPolicy.train = train


def test_a_run_ends_before_the_time_by_which_it_must_be_saved(tmp_path, forks, whole):
    """A job that ends too soon for a step is refused; the next one ends in the middle, and a third completes it."""
    refused = forks.run_ranks(tmp_path, *INTERRUPTED, ranks=2, before=_in_a_job_that_ends_soon)
    assert [rank.status for rank in refused] == [2, 2] and steps_of(tmp_path) == [], refused
    assert "the SLURM job's time limit leaves no time for a step and its save" in refused[0].err
    ended = forks.run_ranks(tmp_path, *INTERRUPTED, ranks=2, before=_in_a_job_that_ends_after_three_steps)
    assert [rank.status for rank in ended] == [STOPPED] * 2 and steps_of(tmp_path) == [1, 2, 3], ended
    assert "because another step and its save may end after the SLURM job's time limit" in ended[0].err
    assert checkpoints(tmp_path / "out", "grpo") == ["step-000003"]
    assert forks.run_ranks(tmp_path, *INTERRUPTED, ranks=2)[0].status == 0
    assert metrics(tmp_path / "out") == whole


def _in_a_job_that_ends_soon() -> None:
    os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 60)


def _in_a_job_that_ends_after_three_steps() -> None:
    """Let the clock of this process jump to the end of its job in the third step."""
    from rl_megatron.runs import run

    os.environ["SLURM_JOB_END_TIME"], calls = str(int(time.time()) + 100_000), []

    class Jumping(run.Stopping):
        def __init__(self, *arguments):
            super().__init__(*arguments, clock=lambda: time.time() + 99_999 * (len(calls) >= 4))

        def reason(self):
            calls.append(1)  # the first call is before the first step
            return super().reason()

    run.Stopping = Jumping


@pytest.mark.change
def test_the_launcher_ends_with_our_message_and_our_status(tmp_path, forks):
    with forks.launch(tmp_path, *INTERRUPTED, "optimizer.lr=-1", ranks=2, restarts=3) as running:
        refused = running.finish()
    assert refused.status == 2
    (line,) = refused.err.strip().splitlines()
    assert line.startswith("error: ") and "optimizer.lr" in line


@pytest.mark.change
def test_the_launcher_names_the_rank_that_was_killed(tmp_path, forks):
    with forks.launch(tmp_path, *INTERRUPTED, "train.steps=1000", ranks=2) as running:
        running.wait_until(lambda: steps_of(tmp_path), "the first step")
        os.kill(running.ranks()[1], signal.SIGKILL)
        ended = running.finish()
    assert ended.status == 1
    line = ended.err.strip().splitlines()[-1]
    assert line.startswith("error: rank 1 (process ") and "first rank to end, killed by SIGKILL" in line

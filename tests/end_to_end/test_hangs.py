"""The watchdog names the rank that hangs and where; a rank that fails alone ends the run with one paragraph."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.end_to_end.launch import TINY_GRPO, metrics

RUN = ("train", *TINY_GRPO, "train.steps=4", "train.save_every=1", "train.async_save=false")
RANKS, PARALLEL = 4, "parallel.tensor=2"
LIMIT = 3.0  # seconds, of train.hang_report_seconds
SECONDS_TO_END = 180.0  # that ranks have after another one failed
# phase → the rank that stops in it, and the step. Rank 0 has the store in these runs, so that rank 1 reports it.
STOPPED = {"train": (2, 1), "generate": (1, 2), "save": (0, 3)}
# The call of the engine in step 2: before it, the logprob check, an evaluation and step 1 have called it.
GENERATES_IN_STEP_2 = 4


def _stop_in_three_phases() -> None:
    """Let this rank stop itself in the phase and the step of `STOPPED` that are its own."""
    from rl_megatron.generation.embedded import EmbeddedEngine
    from rl_megatron.runs.checkpointer import Checkpointer
    from rl_megatron.training.megatron_policy import MegatronPolicy

    for owner, method, phase in (
        (MegatronPolicy, "train", "train"),
        (EmbeddedEngine, "complete", "generate"),
        (Checkpointer, "save", "save"),
    ):
        rank, step = STOPPED[phase]
        if os.environ["RANK"] == str(rank):
            call = GENERATES_IN_STEP_2 if phase == "generate" else step
            setattr(owner, method, _stopping(getattr(owner, method), phase, call))


def _stopping(method, phase, call):
    calls = 0

    def stop_once(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls == call:
            _wait_for_heartbeats()
            Path(f"stopping_{phase}").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return method(*arguments, **keywords)

    return stop_once


def _wait_for_heartbeats() -> None:
    """Wait until this rank has written where it is."""
    from rl_megatron.observability.liveness import Heartbeat

    sent, send = [], Heartbeat.send

    def counted(self, *arguments, **keywords):
        send(self, *arguments, **keywords)
        sent.append(1)

    Heartbeat.send = counted
    while len(sent) < 2:
        time.sleep(0.01)
    Heartbeat.send = send


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, forks):
    directory = tmp_path_factory.mktemp("undisturbed")
    done = forks.run_ranks(directory, *RUN, PARALLEL, ranks=RANKS)
    assert [rank.status for rank in done] == [0] * RANKS, done
    assert not (directory / "out" / "failure.json").exists()
    return metrics(directory / "out")


def test_the_watchdog_names_the_rank_that_stopped_and_its_phase_and_the_run_goes_on(tmp_path, forks, undisturbed):
    file = tmp_path / "out" / "failure.json"
    watched = (*RUN, PARALLEL, f"train.hang_report_seconds={LIMIT}")
    with forks.start(tmp_path, *watched, ranks=RANKS, before=_stop_in_three_phases) as running:
        for phase, (rank, step) in STOPPED.items():
            running.wait_until((tmp_path / f"stopping_{phase}").exists, f"a stop in {phase}")
            began = time.monotonic()

            def is_reported(rank=rank, phase=phase):
                return file.is_file() and _named(json.loads(file.read_text()))[:2] == (rank, phase)

            running.wait_until(is_reported, f"the report of rank {rank} in {phase}")
            assert time.monotonic() - began < 30, "the report came too late"
            reported = json.loads(file.read_text())
            assert (reported["kind"], reported["step"], reported["pid"]) == ("hang", step, running.pids[rank])
            assert len(reported["ranks"]) == RANKS and reported["stacks"][0]["stack"]
            os.kill(running.pids[rank], signal.SIGCONT)
        done = running.finish_ranks()
    assert [each.status for each in done] == [0] * RANKS, done
    assert metrics(tmp_path / "out") == undisturbed
    for phase, (rank, step) in STOPPED.items():
        reporter = 1 if rank == 0 else 0
        (line,) = [line for line in done[reporter].err.splitlines() if f"hang: rank {rank} on" in line]
        assert f"step {step} of 4, phase {phase}" in line and "train.collective_timeout_minutes" in line


def _named(report):
    return report["rank"], report["phase"]


def _fail_on_rank_1() -> None:
    """Let rank 1 fail in its first step. Ranks that wait for each other are ended after a time that is longer here."""
    from rl_megatron.runs import run
    from rl_megatron.training.megatron_policy import MegatronPolicy

    run.RunWatch = partial(run.RunWatch, seconds_to_end=SECONDS_TO_END)

    def fail(self, *arguments, **keywords):
        raise ZeroDivisionError("my loss divides by zero")

    if os.environ["RANK"] == "1":
        MegatronPolicy.train = fail


def test_an_exception_on_one_rank_ends_all_ranks_with_one_paragraph(tmp_path, forks):
    began = time.monotonic()
    with forks.start(
        tmp_path, *RUN, PARALLEL, "train.hang_report_seconds=8", ranks=RANKS, before=_fail_on_rank_1
    ) as running:
        done = running.finish_ranks()
    assert time.monotonic() - began < SECONDS_TO_END, "ranks that know of the failure waited until they were ended"
    assert [rank.status for rank in done] == [1] * RANKS, done
    (line,) = [line for line in done[0].err.splitlines() if "error" in line]
    assert line.startswith("error: rank 1 on ") and "stage grpo, step 1 of 4, phase train" in line
    assert "ZeroDivisionError: my loss divides by zero, at " in line and "test_hangs.py" in line
    assert "Traceback" not in "".join(rank.err for rank in done)
    assert all(rank.err == "" for rank in done[1:]), done
    report = json.loads((tmp_path / "out" / "failure.json").read_text())
    assert (report["kind"], report["rank"], report["phase"]) == ("error", 1, "train")
    assert report["traceback"][-1] == "ZeroDivisionError: my loss divides by zero"

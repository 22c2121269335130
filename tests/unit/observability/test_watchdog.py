"""The watchdog on a store in memory: one report per hang with the stacks of all that answer, and a word at its end."""

import json
import sys
import threading
import traceback

import pytest
import torch.distributed as dist

from rl_megatron import log
from rl_megatron.observability import liveness
from rl_megatron.observability.failures import FailureFile, FirstFailure, record_failure
from rl_megatron.observability.liveness import Heartbeat, Place, Position
from rl_megatron.observability.run_watch import RunWatch
from rl_megatron.observability.watchdog import Watchdog

LIMIT, TICK = 3.0, 1.0


class Job:
    """The heartbeats of some ranks and the watchdogs of ranks 0 and 1, on one store."""

    def __init__(self, output_dir, size):
        self.store, self.said, self.size = dist.HashStore(), [], size
        self.positions = [Position() for _ in range(size)]
        self.beats = [Heartbeat(self.store, rank, self.positions[rank], 2 * TICK) for rank in range(size)]
        self.file = FailureFile(output_dir)
        self.file.begin(is_writer=True)
        self.watchdogs = [self.watchdog(rank) for rank in (0, 1)]

    def watchdog(self, rank):
        say = lambda text: self.said.append((rank, text))  # noqa: E731
        return Watchdog(self.store, rank, self.size, LIMIT, 2 * TICK, self.file, 10.0, say)

    def tick(self, times=1, stopped=(), elapsed=TICK, going_on=()):
        for _ in range(times):
            for rank in going_on:
                self.positions[rank].enter("train")
            for rank, beat in enumerate(self.beats):
                if rank not in stopped:
                    beat.send(elapsed)
                    beat.send_requested_stacks()
            for rank, watchdog in enumerate(self.watchdogs):
                if rank not in stopped:
                    watchdog.tick(elapsed)

    def report(self):
        return json.loads(self.file.path.read_text())


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path, 4)
    for position in job.positions:
        position.begin_stage("sft", 9)
        position.begin_step(2)
    return job


ALL = range(4)


def test_a_silent_rank_is_reported_once_with_the_stacks_of_the_others(job):
    job.tick(3, going_on=ALL)
    job.tick(12, stopped=[2], going_on=[0])
    ((rank, text),) = job.said
    assert (
        rank == 0
        and "hang: rank 2 on" in text
        and "failure.json has the stacks of ranks 0, 1 and 3. Nothing is ended" in text
    )
    assert "10 minutes after they began to wait" in text
    report = job.report()
    assert (report["kind"], report["rank"], report["step"], report["stage"]) == ("hang", 2, 2, "sft")
    assert [each["rank"] for each in report["ranks"]] == [0, 1, 2, 3]
    (stack,) = report["stacks"]  # equal stacks are there once
    assert stack["ranks"] == [0, 1, 3]


def test_ranks_that_go_on_after_a_report_are_said_to_and_the_next_hang_is_reported_as_well(job):
    job.tick(12, stopped=[3], going_on=[0])
    job.tick(2, going_on=ALL)
    assert [text for _, text in job.said][1] == "hang: it has ended, rank 3 made progress again"
    assert job.report()["ended"] is True
    job.tick(12, stopped=[2], going_on=[0])
    assert "hang: rank 2 on" in job.said[2][1] and len(job.said) == 3


def test_rank_1_reports_if_rank_0_is_silent(job):
    job.tick(2, going_on=ALL)
    job.tick(12, stopped=[0], going_on=[1])
    assert [(rank, "hang: rank 0 on" in text) for rank, text in job.said] == [(1, True)]


def test_a_process_that_was_stopped_for_long_does_not_count_that_time(job):
    job.tick(2, going_on=ALL)
    job.tick(1, elapsed=600.0)
    assert job.said == []


def test_a_rank_that_never_sent_a_heartbeat_is_silent(job):
    job.tick(12, stopped=[3], going_on=[0])
    assert job.report()["rank"] == 3 and job.said[0][1].count("an unknown host") == 1


def test_the_first_failure_stays_whoever_records_later():
    store = dist.HashStore()
    first, second = FirstFailure(store), FirstFailure(store.clone())
    assert first.get() is None and not first.has_been_reported()
    secret = record_failure(ValueError("no http://me:hunter2@host"), 2, Place(), on_all_ranks=False)
    assert "hunter2" not in str(secret)
    failure = record_failure(ValueError("a\n b"), 2, Place("sft", 1, 2, 3, "train"), on_all_ranks=False)
    assert first.record(failure) == failure and failure["message"] == "ValueError: a b"
    assert second.record(failure | {"rank": 0}) == second.get() == failure
    second.mark_reported()
    assert first.has_been_reported()


def test_the_end_of_a_connection_is_not_taken_for_the_failure_of_this_rank():
    kinds = {
        "Connection closed by peer [127.0.0.1]:4711": "lost",
        "The size of tensor a (3) must match the size of tensor b (4)": "error",
    }
    for message, kind in kinds.items():
        assert record_failure(RuntimeError(message), 0, Place(), on_all_ranks=False)["kind"] == kind


def test_nothing_is_written_before_the_directory_is_this_runs_and_an_earlier_file_is_kept(tmp_path):
    file = FailureFile(tmp_path)
    assert "No file has the report" in file.write({"kind": "error"}, "the report") and not list(tmp_path.iterdir())
    file.path.write_text("of an earlier attempt")
    file.begin(is_writer=True)
    assert not file.path.exists() and (tmp_path / "failure.previous.json").read_text() == "of an earlier attempt"
    assert file.write({"kind": "error"}, "the report") == f"{file.path} has the report"
    assert json.loads(file.path.read_text()) == {"kind": "error"}


def test_a_report_that_cannot_be_written_says_why(tmp_path):
    file = FailureFile(tmp_path / "gone")
    file.begin(is_writer=True)
    assert "could not be written" in file.write({"kind": "error"}, "it")


def test_a_run_of_one_rank_is_watched_and_leaves_nothing_behind(tmp_path):
    before = threading.active_count()
    with RunWatch(dist.HashStore(), 0, 1, 300.0, 10.0, FailureFile(tmp_path)) as watch:
        watch.begin_writing()
        log.report_progress(1, 2, "microbatches")
        assert watch.position.place.done == 1
        watch.report_error(ValueError("bad"), on_all_ranks=False)
    log.report_progress(2, 2, "microbatches")
    assert watch.position.place.done == 1 and threading.active_count() == before
    assert json.loads((tmp_path / "failure.json").read_text())["message"] == "ValueError: bad"


def test_nothing_is_started_if_the_watch_is_off(tmp_path):
    before = threading.active_count()
    with RunWatch(dist.HashStore(), 0, 1, 0.0, 10.0, FailureFile(tmp_path)):
        assert threading.active_count() == before


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_store_prints_its_own_failure(tmp_path, capsys, monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    watch = RunWatch(None, rank, 2, LIMIT, 10.0, FailureFile(tmp_path))
    watch.report_error(ValueError("the message"), on_all_ranks=True)
    assert capsys.readouterr().err == "", "every rank raises it, and `run` prints it"
    watch.report_error(ValueError("the message"), on_all_ranks=False)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"rank {rank}" in line and "the message" in line


def outwards(frame):
    return [outer for outer, _ in traceback.walk_stack(frame)]


def test_a_thread_that_waits_in_a_collective_is_said_to_with_the_line_that_called_it():
    frames = []
    code = "def wrapper():\n    look()\ndef all_reduce():\n    wrapper()\n"
    functions = {"look": lambda: frames.extend(outwards(sys._getframe(1)))}
    exec(compile(code, dist.distributed_c10d.__file__, "exec"), functions)
    functions["all_reduce"]()
    found = liveness.find_wait(frames)
    assert found.collective == "all_reduce" and found.at.startswith("tests/unit/observability/test_watchdog.py:")
    functions["look"] = lambda: None
    here = liveness.find_wait(outwards(sys._getframe()))
    assert here.collective is None and here.at.startswith("tests/unit/observability/test_watchdog.py:")


def test_a_frame_at_an_instruction_of_no_line_is_said_to_be_at_the_first_line_of_its_function():
    code = compile("\n\ndef f():\n    frames.append(sys._getframe())\n", "/user/program.py", "exec")
    frames = []
    space = {"frames": frames, "sys": sys}
    exec(code, space)
    space["f"].__code__ = space["f"].__code__.replace(co_linetable=b"")  # Python then knows no line
    space["f"]()
    assert frames[0].f_lineno is None
    assert liveness.find_wait(frames).at == "/user/program.py:3"


def test_stacks_begin_with_the_main_thread_and_leave_out_the_one_that_asks():
    texts = []
    thread = threading.Thread(target=lambda: texts.append(liveness.format_stacks()), name="asking")
    thread.start()
    thread.join()
    assert texts[0].startswith("thread MainThread:") and "thread asking" not in texts[0]
    assert "test_stacks_begin_with_the_main_thread" in texts[0]

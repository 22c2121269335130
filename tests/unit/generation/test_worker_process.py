"""Requests to worker processes: answers, deaths and timeouts are reported, and no process is left over."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_megatron import log
from rl_megatron.generation.transformers import process
from rl_megatron.generation.transformers.process import Answers, EngineWorkers
from tests.child_processes import children_with

SOON = 20.0  # seconds; the echo worker answers in milliseconds


@pytest.fixture
def start(monkeypatch):
    """Yield a function that starts echo workers, which end after the test."""
    monkeypatch.setattr(process, "WORKER_MODULE", "tests.unit.generation.echo_worker")
    started = []

    def run(count=1, timeout_seconds=SOON):
        started.append(EngineWorkers(count, timeout_seconds))
        return started[-1]

    yield run
    for workers in started:
        workers.shutdown(at_once=True)


def pids():
    return [worker.pid for worker in children_with("tests.unit.generation.echo_worker")]


def test_answers_come_in_the_order_of_the_engines(start):
    workers = start(2)
    workers.ask("sleep", (0.2, "slow"), (0.0, "quick"))
    assert workers.collect_answers(0.01) is None, "an answer came too early"
    assert workers.collect_answers(SOON) == Answers(values=((0.2, "slow"), (0.0, "quick")))
    workers.ask("echo", ("for one alone",))
    assert workers.collect_answers(SOON) == Answers(values=(("for one alone",),))


def test_progress_is_added_up_over_engines_and_is_no_answer(start):
    reports = []
    log.watch_progress(lambda *report: reports.append(report))
    try:
        workers = start(2)
        workers.ask("work", (3,), (2,))
        assert workers.collect_answers(SOON) == Answers(values=((3,), (2,)))
        assert reports[-1][:3] == (5, 5, "sequences") and len(reports) == 5
        assert all(done <= total for done, total, *_ in reports)
        workers.ask("work", (1,))
        workers.collect_answers(SOON)
        assert reports[-1] == (1, 1, "sequences", "token 0"), "an answer later nothing is left of it"
    finally:
        log.watch_progress(None)
    workers.ask("work", (3,))
    assert workers.collect_answers(SOON) == Answers(values=((3,),)), "nobody needs to watch"


@pytest.mark.parametrize(("method", "how"), [("die", "was killed by SIGKILL"), ("leave", "exited with status 3")])
def test_a_death_is_reported_with_its_cause(start, method, how):
    workers = start(2)
    (_, second) = pids()
    workers.ask(method, (False,), (True,))  # only the second engine dies
    assert workers.collect_answers(SOON).died == f"rollout engine 1 (process {second}) {how}"


def test_a_death_while_idle_is_found_by_the_next_request(start):
    workers = start()
    workers.ask("echo", ())
    workers.collect_answers(SOON)
    os.kill(pids()[0], signal.SIGKILL)
    time.sleep(0.2)
    workers.ask("echo", ())
    assert "was killed by SIGKILL" in workers.collect_answers(SOON).died


def test_an_engine_that_does_not_answer_counts_as_dead(start):
    workers = start(timeout_seconds=1.0)
    began = time.monotonic()
    workers.ask("sleep", (60.0,))
    assert "did not answer within 0.0167 minutes" in workers.collect_answers(SOON).died
    assert time.monotonic() - began < 5


def test_hurried_engines_have_less_time_and_an_error_has_priority_over_a_timeout(start):
    workers = start()
    began = time.monotonic()
    workers.ask("sleep", (60.0,))
    workers.hurry(0.2, "a collective failed")
    workers.hurry(50.0, "that")  # does not extend the deadline
    assert "did not answer within 0.2 seconds after a collective failed" in workers.collect_answers(SOON).died
    two = start(2)
    two.ask("echo", (), ())
    two.collect_answers(SOON)  # both have started
    two.ask("failed", (0.0,), (60.0,))  # the first engine raises, the second is busy
    two.hurry(1.0, "a collective failed")
    answers = two.collect_answers(SOON)
    assert answers.died is None and "because" in answers.failed == answers.failure
    assert time.monotonic() - began < 15


@pytest.mark.change
def test_an_engine_that_does_not_read_counts_as_dead(start):
    workers = start(timeout_seconds=1.0)
    os.kill(pids()[0], signal.SIGSTOP)
    workers.ask("echo", ("x" * 10_000_000,))  # more than the connection buffers
    assert "stopped answering" in workers.collect_answers(SOON).died


@pytest.mark.parametrize("kind", ["refused", "failed", "broken"])
def test_an_engines_refusal_is_reported_with_its_name(start, kind):
    workers = start()
    workers.ask(kind, (0.0,))
    assert getattr(workers.collect_answers(SOON), kind) == f"rollout engine 0 (process {pids()[0]}): because"


def test_shutdown_leaves_no_process(start):
    workers = start(2)
    workers.ask("sleep", (0.0,), (60.0,))  # the second has to be killed
    started = pids()
    workers.shutdown(at_once=True)
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


@pytest.mark.change
def test_a_busy_process_ends_with_its_parent():
    program = (
        "import time, psutil\nfrom rl_megatron.generation.transformers import process\n"
        "process.WORKER_MODULE = 'tests.unit.generation.echo_worker'\n"
        "workers = process.EngineWorkers(1, 60.0)\n"
        "workers.ask('echo', ())\nworkers.collect_answers(20.0)\nworkers.ask('sleep', (60.0,))\n"
        "print(psutil.Process().children()[0].pid, flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        child = Path(f"/proc/{int(parent.stdout.readline())}")
        assert child.exists()
        parent.kill()
    deadline = time.monotonic() + SOON
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.change
def test_a_worker_imports_no_megatron_and_ends_without_a_parent():
    program = (
        "import sys, rl_megatron.generation.transformers.worker as worker\n"
        "assert not [name for name in sys.modules if name.startswith('megatron')]\n"
        "worker.main(['0', '0', '1'], None)\n"  # process 1 is not its parent
        "sys.exit('still here')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

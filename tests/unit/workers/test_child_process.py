"""A child process is ended once, with all its children, and says how."""

import os
import signal
import time

import psutil
import pytest

from rl_megatron.workers.child_process import ChildProcess


@pytest.fixture
def process():
    started = ChildProcess("tests.unit.workers.starts_a_child")
    yield started
    started.end()


def child_of(process):
    """Return the process id of the child that the process has started."""
    while not (messages := list(process.receive())):
        time.sleep(0.01)
    return messages[0]


def has_ended(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (lambda process: process.end(), "was killed"),
        (lambda process: process.leave(20.0), "exited with status 3"),
        (lambda process: os.kill(process.pid, signal.SIGKILL), "was killed by SIGKILL"),
    ],
    ids=["killed by its parent", "asked to leave", "killed by somebody"],
)
def test_a_process_ends_once_with_its_children_and_says_how(process, end, how):
    child = child_of(process)
    assert not has_ended(child)
    end(process)
    process.has_exited()
    assert [process.end(), process.end()] == [how, how]
    process.leave()
    deadline = time.monotonic() + 10
    while not has_ended(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)

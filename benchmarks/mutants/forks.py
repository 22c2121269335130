"""Run tests in forks of a process that has done the imports, but has imported neither the package nor its tests."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from benchmarks.mutants.copies import REPOSITORY

_PR_SET_CHILD_SUBREAPER = 36
_OWN = ("rl_megatron", "tests", "benchmarks", "__main__")
_LIST_IMPORTS = "import sys, tests.conftest, tests.preloaded; print(*sys.modules, sep='\\n')"
_COLLECTION_SECONDS = 180.0  # from the start of a fork to its first test, at most


@dataclass
class Outcome:
    """What tests did.

    Attributes:
        failed: The tests that failed, in order; or the file that could not be collected.
        ran: The tests that ended.
        late: The test that took too long, "collection", or None.
        complete: Whether pytest ended by itself.
    """

    failed: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    late: str | None = None
    complete: bool = False


def prepare(root: Path, bytecode: Path) -> None:
    """Import what the tests of the copy `root` import from elsewhere, and adopt all processes that descend from here.

    Raises:
        RuntimeError: Own modules are imported already, so that forks would not import those of the copy.
    """
    os.environ |= {
        "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "PYTHONPYCACHEPREFIX": str(bytecode),
    }  # fmt: skip
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix, sys.dont_write_bytecode = str(bytecode), False
    listed = subprocess.run([sys.executable, "-c", _LIST_IMPORTS], cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        if name.partition(".")[0] not in _OWN:
            with suppress(ImportError, AttributeError):
                importlib.import_module(name)
    imported = [name for name in sys.modules if name.partition(".")[0] in ("rl_megatron", "tests")]
    if imported:
        raise RuntimeError(f"{imported} are imported already")
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def run_tests(
    root: Path, batches: Sequence[Sequence[tuple[str, float]]], log: Path, options: Sequence[str], stop_early: bool
) -> Outcome:
    """Run batches of tests in a fork, and kill every process that it leaves.

    Args:
        root: The copy of the repository.
        batches: Tests, each with the seconds after which it is late; a batch begins if none before it has failed.
        log: The file for the output.
        options: More options of pytest.
        stop_early: Whether the first failure ends the run.
    """
    outcome, limits = Outcome(), {test: seconds for batch in batches for test, seconds in batch}
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_in_fork(root, [[test for test, _ in batch] for batch in batches], log, options, stop_early, writing)
    os.close(writing)
    deadline, waits_for, text = time.monotonic() + _COLLECTION_SECONDS, "collection", b""
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                outcome.late = waits_for
                break
            if not select.select([reading], [], [], min(left, 1.0))[0]:
                if os.waitpid(pid, os.WNOHANG)[0]:  # other processes may keep the pipe open
                    break
                continue
            received = os.read(reading, 1 << 16)
            if not received:
                break
            *lines, text = (text + received).split(b"\n")
            for event, value in map(json.loads, lines):
                if event == "begin":
                    waits_for, deadline = value, time.monotonic() + limits[value]
                elif event == "end":
                    outcome.ran.append(value)
                    waits_for, deadline = "collection", time.monotonic() + _COLLECTION_SECONDS
                elif event == "failed" and value not in outcome.failed:
                    outcome.failed.append(value)
                elif event == "complete":
                    outcome.complete = True
                    return outcome
    finally:
        os.close(reading)
        kill_children()
    return outcome


def kill_children() -> None:
    """Kill every process that descends from this one, and those that were left to it."""
    while pids := _children(os.getpid()):
        for pid in pids:
            for each in [pid, *_descendants(pid)]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _descendants(pid: int) -> list[int]:
    return [each for child in _children(pid) for each in (child, *_descendants(child))]


def _children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        tasks = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for task in tasks if task.exists() for child in task.read_text().split()]
    return []


class _Reporter:
    """The plugin of a fork: it keeps the tests that were asked for, and reports what they do."""

    def __init__(self, wanted: Sequence[str], report: Callable[[str, str], None]) -> None:
        self._wanted, self._report = wanted, report
        self.has_failed = False

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        wanted = set(self._wanted)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
        items[:] = [item for item in items if item.nodeid in wanted]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.has_failed = True
            self._report("failed", report.nodeid)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._report("begin", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.has_failed = True
            self._report("failed", report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._report("end", nodeid)


def _run_in_fork(
    root: Path, batches: list[list[str]], log: Path, options: Sequence[str], stop_early: bool, pipe: int
) -> NoReturn:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(root)
    sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(REPOSITORY)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]  # tests import that of the copy
    importlib.invalidate_caches()
    _fork_the_server()

    def report(event: str, value: str) -> None:
        os.write(pipe, json.dumps([event, value]).encode() + b"\n")

    status = 1
    try:
        import pytest

        for batch in batches:
            reporter = _Reporter(batch, report)
            files = list(dict.fromkeys(test.partition("::")[0] for test in batch))
            stop = ["-x"] if stop_early else []
            arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *stop, *options, *files]
            ended = pytest.main(arguments, plugins=[reporter])
            if ended > 1 and ended != pytest.ExitCode.NO_TESTS_COLLECTED and not reporter.has_failed:
                reporter.has_failed = True  # nothing could be collected
                report("failed", files[0])
            if reporter.has_failed and stop_early:
                break
        report("complete", "")
        status = 0
    finally:
        sys.stdout.flush()
        os._exit(status)


def _fork_the_server() -> None:
    """Let the server of `multiprocessing.forkserver` be a fork of this process as it is now, instead of a new Python.

    The fork waits until the server is wanted; then it gets the server's open files, environment and working directory.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    module: Any = forkserver  # `util` is not in its stub
    original = module.util

    def spawn(path: str, args: Sequence[str], files: Sequence[int]) -> int:
        if not str(args[-1]).startswith("from multiprocessing.forkserver import main"):
            return original.spawnv_passfds(path, args, files)
        module.util = original  # a server that ended is followed by a new Python
        state = {"command": args[-1], "files": list(files), "environment": dict(os.environ), "directory": os.getcwd()}
        message = json.dumps(state).encode()
        socket.send_fds(ours, [len(message).to_bytes(8, "big")], list(files))
        ours.sendall(message)
        ours.close()
        return pid

    module.util = SimpleNamespace(**{**vars(original), "spawnv_passfds": spawn})


def _serve(connection: socket.socket) -> NoReturn:
    """Wait for what a server needs, and be the server."""
    status = 1
    try:
        length, files, _, _ = socket.recv_fds(connection, 8, 16)
        if length:
            message = b""
            while len(message) < int.from_bytes(length, "big"):
                message += connection.recv(1 << 16)
            state = json.loads(message)
            high = [os.dup2(file, 1000 + number) for number, file in enumerate(files)]
            for file in (*files, connection.detach()):
                os.close(file)
            for file, number in zip(high, state["files"], strict=True):
                os.dup2(file, number)
                os.close(file)
            os.environ.clear()
            os.environ.update(state["environment"])
            os.chdir(state["directory"])
            exec(state["command"], {})
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

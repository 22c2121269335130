"""Processes that are forks of this one, which has imported everything: they start without imports.

`start` makes two: a leader, which never touches a GPU, and a worker, which runs the function. The worker asks its
leader for further processes (`ask_leader`), because a fork of a process that has used a GPU, or OpenMP's threads, does
not work. The leader leads a session, in which all these processes are, and ends them when the process that started it
has ended.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Protocol

import psutil

_SECONDS_TO_END = 2.0
_PR_SET_PDEATHSIG = 1
_connection: Connection | None = None  # to this process's leader


@dataclass(frozen=True)
class Request:
    """A pickled (function, arguments), and variables of the environment of the process that calls it."""

    call: bytes
    variables: Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """What a function returned, or the traceback of its error, or the status of its process if it ended first."""

    value: Any = None
    error: str | None = None
    status: int | None = None


class Process(Protocol):
    """What a process that leads a session has; `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None: ...


class Fork:
    """A process that `start` has made."""

    def __init__(self, pid: int):
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


def start(function: Callable[[], int], log: Path, variables: Mapping[str, str]) -> Fork:
    """Start a process whose exit status is what the function returns. Its output goes to a file.

    Args:
        function: The function.
        log: The file.
        variables: Variables of its environment, besides those of this process.
    """
    parent = os.getpid()
    _flush()
    pid = os.fork()
    return Fork(pid) if pid else _run_and_exit(lambda: _lead(parent, function, log, variables))


def end(*processes: Process) -> None:
    """End processes and all that they have started. torchrun ends its own ranks if it is asked to."""
    descendants = [child for process in processes for child in _descendants(process.pid)]
    for process in processes:
        _signal_group(process.pid, signal.SIGTERM)
    ends = time.monotonic() + 1.5 * _SECONDS_TO_END
    while time.monotonic() < ends and any(process.poll() is None for process in processes):
        time.sleep(0.02)
    for process in processes:
        _signal_group(process.pid, signal.SIGKILL)
        if process.poll() is None:  # it has not become the leader of a session yet
            os.kill(process.pid, signal.SIGKILL)
    for child in descendants:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    while any(process.poll() is None for process in processes):
        time.sleep(0.02)


def has_leader() -> bool:
    return _connection is not None


def ask_leader(request: Request) -> Answer:
    """Return what a function gives in a new process, which the leader of this process starts."""
    assert _connection is not None
    _connection.send_bytes(pickle.dumps(request))
    return pickle.loads(_connection.recv_bytes())


def answer(connection: Connection, request: Request) -> None:
    """Call the function of a request, and send its answer."""
    os.environ.update(request.variables)
    try:
        function, arguments = pickle.loads(request.call)
        found = Answer(function(*arguments))
    except BaseException:
        found = Answer(error=traceback.format_exc())
    # `send` would share the memory of tensors, and the sender ends before it is read.
    connection.send_bytes(pickle.dumps(found))


def _lead(parent: int, function: Callable[[], int], log: Path, variables: Mapping[str, str]) -> int:
    os.setsid()
    signal.signal(signal.SIGTERM, _end_session)
    _receive_at_death_of(parent, signal.SIGTERM)
    for descriptor, file in ((0, os.devnull), (1, log), (2, log)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout, sys.stderr = (open(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    os.environ.update(variables)
    if "torch" in sys.modules:  # it has read the variable already
        sys.modules["torch"].set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    ours, theirs = multiprocessing.Pipe()
    leader, worker = os.getpid(), os.fork()
    if worker == 0:
        ours.close()
        _run_and_exit(lambda: _work(leader, theirs, function))
    theirs.close()
    return _serve(ours, worker)


def _work(leader: int, connection: Connection, function: Callable[[], int]) -> int:
    global _connection
    _follow(leader)
    _connection = connection
    return function()


def _serve(connection: Connection, worker: int) -> int:
    """Start processes for the worker until it ends, and return its status."""
    while True:
        with suppress(EOFError):
            if connection.poll(0.1):
                _start_asked(connection, pickle.loads(connection.recv_bytes()))
        pid, status = os.waitpid(worker, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)


def _start_asked(connection: Connection, request: Request) -> None:
    leader, pid = os.getpid(), os.fork()
    if pid == 0:
        _follow(leader)
        _run_and_exit(lambda: answer(connection, request) or 0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        with suppress(OSError):
            connection.send_bytes(pickle.dumps(Answer(status=status)))


def _follow(leader: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _receive_at_death_of(leader, signal.SIGKILL)


def _receive_at_death_of(parent: int, number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), number)


def _end_session(*arguments: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    descendants = _descendants(os.getpid())
    _signal_group(os.getpid(), signal.SIGTERM)
    _, alive = psutil.wait_procs(descendants, _SECONDS_TO_END)
    for child in alive:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    _signal_group(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)


def _run_and_exit(function: Callable[[], int]) -> NoReturn:
    """End this process with what the function returns, and run nothing that its parent has registered for its end."""
    status = 1
    try:
        status = function()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            _flush()
        os._exit(status)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()

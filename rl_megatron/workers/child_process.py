"""`ChildProcess`: a process that exchanges messages over a non-blocking socket, and is killed with its children."""

from __future__ import annotations

import math
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from rl_megatron.config.loading.import_strings import imported_files
from rl_megatron.workers.calls import CallMark
from rl_megatron.workers.frames import add_length, dumps, split_frames

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# This program makes this package importable, but not packages beside it, which may be for another interpreter.
_RUN_MODULE = """
import importlib, importlib.util, os, sys
directory, name = sys.argv.pop(1), sys.argv.pop(1)
package = os.path.basename(directory)
file = os.path.join(directory, "__init__.py")
spec = importlib.util.spec_from_file_location(package, file, submodule_search_locations=[directory])
sys.modules[package] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[package])
sys.exit(importlib.import_module(name).main(sys.argv[1:]))
"""
_SECONDS_TO_EXIT = 0.2  # the socket of a process closes a moment before the process has exited
_STDERR = 2
_MEBIBYTE = 1 << 20


class ChildProcess:
    """A process that runs a module of this package, and our end of its socket. It ends with the thread that started it.

    Attributes:
        socket: Our end, which does not block.
        mark: The note of the call that the process is running.
        has_ended: Whether its socket is closed, or the process has ended.
    """

    def __init__(
        self,
        module: str,
        *,
        python: str | None = None,
        threads: int | None = 1,
        dumps: Callable[[object], bytes] = dumps,
        loads: Callable[[bytes], object] = pickle.loads,
        most_bytes: float = math.inf,
    ) -> None:
        """Start the process.

        Args:
            module: The module to run, which passes its command-line arguments to `child.connect`.
            python: The interpreter; the module can import its packages and this one. None: this process's interpreter.
            threads: The value of OMP_NUM_THREADS, unless the user has set it. None: leave it unset.
            dumps: Encodes a message as bytes.
            loads: Decodes a message from the process.
            most_bytes: The maximum number of bytes in a message from the process.
        """
        self._python, self._dumps, self._loads, self._most_bytes = python, dumps, loads, most_bytes
        self._how_it_ended: str | None = None
        ours, theirs = socket.socketpair()
        with theirs, _open_memory() as shared:
            shared.write(bytes(CallMark.SIZE))
            shared.flush()
            self.mark = CallMark(mmap.mmap(shared.fileno(), CallMark.SIZE))
            self.mark.clear()
            command, environment = build_module_command(module, python)
            defaults = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(shared.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), shared.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # so that what it prints does not mix with the output of the run
                env=defaults | environment,
                start_new_session=True,  # its children are in its group, and Ctrl-C reaches only the rank
            )
        ours.setblocking(False)
        self.socket = ours
        self._outgoing, self._incoming = bytearray(), bytearray()
        self.has_ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def prepare(self, memory_mb: float | None) -> None:
        """Send what `child.serve_user_code` reads first.

        That is the import path, the files that import strings named so far, and the memory limit (None: no limit).
        An allocation beyond the limit raises MemoryError.
        """
        paths = list(map(os.path.abspath, sys.path)) if self._python is None else list_user_paths()
        memory = None if memory_mb is None else int(memory_mb * _MEBIBYTE)
        self.send(paths, self._python is not None, imported_files(), memory)

    @property
    def wants_to_write(self) -> bool:
        """Return whether a part of a message has not been sent yet."""
        return bool(self._outgoing)

    def send(self, *message: object) -> None:
        """Send as much of a message as the socket accepts now; `flush` sends the rest."""
        self._outgoing += add_length(self._dumps(message))
        self.flush()

    def flush(self) -> None:
        """Send as much of the pending bytes as the socket accepts now."""
        try:
            while self._outgoing:
                sent = self.socket.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the process has ended; `receive` reads what it sent before
            self._outgoing.clear()

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived."""
        try:
            while part := self.socket.recv(1 << 20):
                self._incoming += part
            self.has_ended = True
        except BlockingIOError:
            pass
        except OSError:
            self.has_ended = True
        yield from split_frames(self._incoming, self._loads, self._most_bytes)

    def poll(self) -> None:
        """Update `has_ended`, even if the process has exited and one of its children keeps the socket open."""
        exited = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.has_ended = self.has_ended or exited is not None

    def has_exited(self) -> bool:
        """Return whether the process has exited, and not only closed its socket."""
        has_exited = self._how_it_ended is not None or self._wait(_SECONDS_TO_EXIT) is not None
        self.has_ended = self.has_ended or has_exited
        return has_exited

    def end(self) -> str:
        """Kill the process, if it still runs, and its children; return how the process ended."""
        if self._how_it_ended is None:
            ended_before = self.has_ended and self._wait(_SECONDS_TO_EXIT) is not None
            status = self._finish()
            self._how_it_ended = describe_end(status) if ended_before else "was killed"
        return self._how_it_ended

    def leave(self, seconds: float = 1.0) -> None:
        """Let the process end by itself; kill it after `seconds`, and its children in any case."""
        if self._how_it_ended is None:
            with suppress(OSError):  # the process has closed the socket
                self.socket.shutdown(socket.SHUT_RDWR)  # the process reads the end of the stream, and ends
            self._wait(seconds)
            self._how_it_ended = describe_end(self._finish())

    def _finish(self) -> int:
        """Kill the process and its children, if they still run; return the exit status of the process."""
        with suppress(ProcessLookupError, PermissionError):
            # The process has not been reaped, so its group id has not been reused.
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self.socket.close()
        return status

    def _wait(self, seconds: float) -> object:
        """Return how the process has ended, or None if it still runs after `seconds`. It is not reaped."""
        until = time.monotonic() + seconds
        while True:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None or time.monotonic() >= until:
                return ended
            time.sleep(0.002)


def describe_end(status: int) -> str:
    """Describe how a process ended, from its `Popen.returncode`, as in "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with status {status}"
    names = {number.value: number.name for number in signal.Signals}  # real-time signals have no name
    return f"was killed by {names.get(-status, f'signal {-status}')}"


def _open_memory() -> IO[bytes]:
    """Return a file that two processes can map. On Linux it is in memory, because a disk could be full."""
    return os.fdopen(os.memfd_create("call"), "r+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


def build_module_command(module: str, python: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the command (without arguments) that runs a module of this package, and its environment variables.

    If `python` is another interpreter, it imports this package from this process's copy, and everything else from its
    own environment.
    """
    if python is None:
        return [sys.executable, "-m", module], build_child_environment()
    package = str(Path(__file__).resolve().parents[1])
    return [python, "-P", "-c", _RUN_MODULE, package, module], build_server_environment({}, {})


def list_user_paths() -> list[str]:
    """Return the directories of `sys.path` that do not belong to this interpreter or its environment."""
    prefixes = {os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}

    def is_users(entry: str) -> bool:
        path = os.path.realpath(entry)
        holds_packages = os.path.basename(path) in ("site-packages", "dist-packages")
        belongs = any(os.path.commonpath([path, prefix]) == prefix for prefix in prefixes)
        return os.path.isdir(path) and not holds_packages and not belongs

    return [entry for entry in map(os.path.abspath, sys.path) if is_users(entry)]


def build_child_environment() -> dict[str, str]:
    """Return this process's environment variables without those of its rank, with this package first in PYTHONPATH."""
    environment = _drop_rank_variables()
    root = str(Path(__file__).resolve().parents[2])
    return environment | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [environment.get("PYTHONPATH")])])}


def build_server_environment(defaults: Mapping[str, str], always: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment variables without those of its rank, for a program with its own Python.

    The user's variables replace `defaults`, and `always` replaces the user's.
    """
    environment = _drop_rank_variables()
    for name in ("VIRTUAL_ENV", "PYTHONHOME"):
        environment.pop(name, None)
    return {**defaults, **environment, **always}


def _drop_rank_variables() -> dict[str, str]:
    # torch.distributed would look for the store of torchrun's agent if it found one of the TORCHELASTIC variables.
    return {
        key: value
        for key, value in os.environ.items()
        if key not in _RANK_VARIABLES and not key.startswith("TORCHELASTIC")
    }

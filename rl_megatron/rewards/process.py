"""Start a worker process, exchange messages with it without ever waiting for it, and end it with all its children."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import IO, Any

from rl_megatron.rewards.frames import CallMark, framed, split_frames
from rl_megatron.rewards.samples import dumps
from rl_megatron.topology.child_process import describe_end, module_command

WORKER_MODULE = "rl_megatron.rewards.worker"
_SECONDS_TO_LEAVE = 1.0
_SECONDS_TO_EXIT = 0.2  # the socket of a process that ends closes a moment before it has ended
_STDERR = 2


def _open_memory() -> IO[bytes]:
    """Return a file that two processes can map. On Linux it is on no disk, which could be full."""
    return os.fdopen(os.memfd_create("call"), "r+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile()


class WorkerProcess:
    """One worker process, and this end of its socket.

    Attributes:
        mark: The call that the worker runs.
        has_ended: Whether its socket is closed, or the process has ended.
    """

    def __init__(
        self,
        module: str = WORKER_MODULE,
        split: Callable[[bytearray], Iterator[Any]] = split_frames,
        python: str | None = None,
    ) -> None:
        """Start the process.

        Args:
            module: The module that it runs. Its arguments are the descriptors of the socket and of the shared memory,
                and the number of this process.
            split: Takes the complete messages from the beginning of what has arrived.
            python: The interpreter; None for that of this process. The module must do without packages that it lacks.
        """
        self._split = split
        ours, theirs = socket.socketpair()
        with theirs, _open_memory() as shared:
            shared.write(bytes(CallMark.SIZE))
            shared.flush()
            self.mark = CallMark(mmap.mmap(shared.fileno(), CallMark.SIZE))
            self.mark.clear()
            command, environment = module_command(module, python)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(shared.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), shared.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # what functions print does not mix with the output of the run
                env={"OMP_NUM_THREADS": "1"} | environment,
                start_new_session=True,  # its children are in its group, and Ctrl-C reaches only the rank
            )
        ours.setblocking(False)
        self.socket = ours
        self._outgoing, self._incoming = bytearray(), bytearray()
        self.has_ended = False

    @property
    def wants_to_write(self) -> bool:
        """Return whether a part of a message is not sent yet."""
        return bool(self._outgoing)

    def send(self, *message: Any) -> None:
        """Send a message, or as much of it as the worker takes now; `flush` sends the rest."""
        self._outgoing += framed(dumps(message))
        self.flush()

    def flush(self) -> None:
        """Send as much as the worker takes now."""
        try:
            while self._outgoing:
                sent = self.socket.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            pass
        except OSError:  # the worker is gone; `receive` finds out what it still said
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
        yield from self._split(self._incoming)

    def look(self) -> None:
        """Find out whether the process has ended, also if one of its children keeps the socket open."""
        exited = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self.has_ended = self.has_ended or exited is not None

    def has_exited(self) -> bool:
        """Return whether the process has ended by itself, and not only closed its socket."""
        return self._wait(_SECONDS_TO_EXIT) is not None

    def end(self) -> str:
        """Kill the process with its children, unless it has ended; return how it ended."""
        before = self._wait(_SECONDS_TO_EXIT) if self.has_ended else None
        self._kill_group()
        status = self._process.wait()
        self.socket.close()
        if before is None:
            return "was killed"
        return describe_end(status)

    def leave(self) -> None:
        """Let the process end by itself; kill it if that takes too long, and its children in any case."""
        self.socket.close()  # the worker reads the end of the stream, and ends
        self._wait(_SECONDS_TO_LEAVE)
        self._kill_group()
        self._process.wait()

    def _wait(self, seconds: float) -> Any:
        """Return how the process has ended, or None if it has not after this time. It stays a zombie."""
        until = time.monotonic() + seconds
        while True:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None or time.monotonic() >= until:
                return ended
            time.sleep(0.002)

    def _kill_group(self) -> None:
        """Kill the process and its children. It has not been waited for, so the group's number is still its own."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

"""What a rank and a worker process share: messages with their length in front, and a mark of the call that runs."""

from __future__ import annotations

import math
import mmap
import os
import pickle
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_LENGTH = struct.Struct("!Q")
# Each is one word, which is copied whole. `struct.pack_into` would write zeros first, which the other process can read.
_CALL = struct.Struct("q")
_NO_CALL = -1
_FUNCTIONS = 1 << 16  # a job has fewer functions
_TIME = struct.Struct("d")  # of `time.monotonic`, which all processes of a machine share
_CALL_WORD, _TIME_WORD = slice(0, _CALL.size), slice(_CALL.size, _CALL.size + _TIME.size)


def framed(payload: bytes) -> bytes:
    """Return a message with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


def write_frame(connection: socket.socket, payload: bytes) -> None:
    """Write a message; wait until the other end has taken it."""
    connection.sendall(framed(payload))


def read_frame(connection: socket.socket) -> Any:
    """Return the next message, or None if the other end has closed the socket."""
    length = _read(connection, _LENGTH.size)
    payload = None if length is None else _read(connection, _LENGTH.unpack(length)[0])
    return None if payload is None else pickle.loads(payload)


class BadFrame(ValueError):
    """What has arrived is no message, or a message that is longer than any that may be sent."""


def split_frames(
    buffer: bytearray, loads: Callable[[bytes], Any] = pickle.loads, most_bytes: float = math.inf
) -> Iterator[Any]:
    """Yield the complete messages at the beginning of a buffer, and remove them.

    Args:
        buffer: What has arrived.
        loads: Reads a message.
        most_bytes: The longest message.

    Raises:
        BadFrame: A message is longer.
    """
    while len(buffer) >= _LENGTH.size:
        length = _LENGTH.unpack_from(buffer)[0]
        if length > most_bytes:
            raise BadFrame(f"a message of {length} bytes was announced, and {most_bytes} are the most")
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        payload = bytes(memoryview(buffer)[_LENGTH.size : end])
        del buffer[:end]
        yield loads(payload)


class CallMark:
    """A note of the call that a worker runs, in memory that it shares with its parent. It outlives the worker."""

    SIZE = mmap.PAGESIZE

    def __init__(self, shared: mmap.mmap):
        """Use memory of `SIZE` bytes."""
        self._shared, self._pid = shared, os.getpid()

    def clear(self) -> None:
        """Mark that no call runs."""
        self.touch()
        self._shared[_CALL_WORD] = _CALL.pack(_NO_CALL)

    def touch(self) -> None:
        """Mark the present time: the worker can go on."""
        self._shared[_TIME_WORD] = _TIME.pack(time.monotonic())

    @property
    def touched(self) -> float:
        """Return when a call last began or ended, or the worker's event loop last went round."""
        return _TIME.unpack(self._shared[_TIME_WORD])[0]

    @contextmanager
    def of(self, job: int, index: int) -> Iterator[None]:
        """Mark, during the block of a `with` statement, that the function `index` runs for a job."""
        self.touch()
        self._shared[_CALL_WORD] = _CALL.pack(job * _FUNCTIONS + index)
        try:
            yield
        finally:
            self.end_forked_child()
            self.clear()

    def end_forked_child(self) -> None:
        """End this process if it is a child that a function forked, and that has returned from the function."""
        if os.getpid() != self._pid:
            os._exit(0)

    def read(self) -> tuple[int, int] | None:
        """Return the (job, function) of the call that runs, or None."""
        (call,) = _CALL.unpack(self._shared[_CALL_WORD])
        return None if call == _NO_CALL else divmod(call, _FUNCTIONS)


def _read(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)

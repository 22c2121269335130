"""What a rank and a worker process share: messages with their length in front, and a mark of the call that runs."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LENGTH = struct.Struct("!Q")
_CALL = struct.Struct("qq")
_NO_CALL = (-1, -1)
_TIME = struct.Struct("d")  # of `time.monotonic`, which all processes of a machine share


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


def split_frames(buffer: bytearray) -> Iterator[Any]:
    """Yield the complete messages at the beginning of a buffer, and remove them."""
    while len(buffer) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        payload = bytes(memoryview(buffer)[_LENGTH.size : end])
        del buffer[:end]
        yield pickle.loads(payload)


class CallMark:
    """A note of the call that a worker runs, in memory that it shares with its parent. It outlives the worker."""

    SIZE = mmap.PAGESIZE

    def __init__(self, shared: mmap.mmap):
        """Use memory of `SIZE` bytes."""
        self._shared, self._pid = shared, os.getpid()

    def clear(self) -> None:
        """Mark that no call runs."""
        self.touch()
        _CALL.pack_into(self._shared, 0, *_NO_CALL)

    def touch(self) -> None:
        """Mark the present time: the worker can go on."""
        _TIME.pack_into(self._shared, _CALL.size, time.monotonic())

    @property
    def touched(self) -> float:
        """Return when a call last began or ended, or the worker's event loop last went round."""
        return _TIME.unpack_from(self._shared, _CALL.size)[0]

    @contextmanager
    def of(self, job: int, index: int) -> Iterator[None]:
        """Mark, during the block of a `with` statement, that the function `index` runs for a job."""
        self.touch()
        _CALL.pack_into(self._shared, 0, job, index)
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
        call = _CALL.unpack_from(self._shared)
        return None if call == _NO_CALL else call


def _read(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)

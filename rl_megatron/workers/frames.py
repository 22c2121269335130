"""Messages between a process and its child: pickles, each with its length in front."""

from __future__ import annotations

import math
import pickle
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

_LENGTH = struct.Struct("!Q")


class BadFrame(ValueError):
    """The error for bytes that are not a message, or for a message that is longer than allowed."""


def dumps(message: object) -> bytes:
    """Encode a message for another process. A class that the other process cannot import is sent with its code."""
    try:
        return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):  # a class within a function, for example
        import cloudpickle

        return cloudpickle.dumps(message)


def add_length(payload: bytes) -> bytes:
    """Return a message with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


def write_frame(connection: socket.socket, payload: bytes) -> None:
    """Write a message; wait until the socket has accepted all of it."""
    connection.sendall(add_length(payload))


def read_frame(connection: socket.socket) -> Any:
    """Return the next message, or None if the other end has closed the socket."""
    length = _read(connection, _LENGTH.size)
    payload = None if length is None else _read(connection, _LENGTH.unpack(length)[0])
    return None if payload is None else pickle.loads(payload)


def split_frames(
    buffer: bytearray, loads: Callable[[bytes], object] = pickle.loads, most_bytes: float = math.inf
) -> Iterator[object]:
    """Yield the complete messages at the beginning of a buffer, and remove them from it.

    Raises:
        BadFrame: A message is longer than `most_bytes`.
    """
    while len(buffer) >= _LENGTH.size:
        length = _LENGTH.unpack_from(buffer)[0]
        if length > most_bytes:
            raise BadFrame(f"a message has {length} bytes, but may have at most {most_bytes}")
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        payload = bytes(memoryview(buffer)[_LENGTH.size : end])
        del buffer[:end]
        yield loads(payload)


def _read(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)

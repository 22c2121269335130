"""The journal: what the service has promised, in the order in which it promised it, so that a killed server goes on.

A record is a header in JSON and a body of bytes. Records are appended to one file; a record that was cut off by a crash
was never acknowledged, and is dropped.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron import log

_FRAME = struct.Struct("<III")  # bytes of the header, bytes of the body, CRC-32 of both
_MAGIC = b"rlmsvc1\n"


@dataclass(frozen=True)
class Record:
    """An entry of the journal: JSON values, and bytes that belong to them."""

    header: Mapping[str, Any]
    body: bytes = b""

    def pack(self) -> bytes:
        header = json.dumps(self.header, separators=(",", ":")).encode()
        return _FRAME.pack(len(header), len(self.body), zlib.crc32(self.body, zlib.crc32(header))) + header + self.body


class Journal:
    """An open journal. Only one process may have it open."""

    def __init__(self, path: Path):
        """Open a journal at its end, or begin one. A record that was cut off is removed."""
        self.path = path
        end = len(_MAGIC)
        if path.exists():
            end = max((end for end, _ in _scan(path)), default=end)
        # Without a buffer, which would keep the bytes of a write that has failed.
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        if self._file.seek(0, os.SEEK_END) < len(_MAGIC):
            self._file.seek(0)
            self._write(_MAGIC)
        elif self._file.tell() > end:
            log.LOGGER.warning("%s: the last record was cut off, so it was never acknowledged and is dropped", path)
        self._file.truncate(max(end, len(_MAGIC)))
        self._file.seek(0, os.SEEK_END)
        self.sync()

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return self._file.tell()

    def append(self, records: Iterable[Record], is_synced: bool = True) -> None:
        """Append records. With `is_synced`, they are on the disk when this returns.

        Raises:
            OSError: The records are not on the disk, and the journal is as before.
        """
        end = self._file.tell()
        try:
            self._write(b"".join(record.pack() for record in records))
            if is_synced:
                self.sync()
        except OSError:
            self._file.seek(end)
            self._file.truncate(end)
            raise

    def _write(self, content: bytes) -> None:
        left = memoryview(content)
        while left:
            left = left[self._file.write(left) :]

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[Record]:
    """Yield the records of a journal, up to the first that is cut off.

    Raises:
        ValueError: The file is not a journal.
    """
    return (record for _, record in _scan(path))


def _scan(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield (the end of the record in the file, the record)."""
    with path.open("rb") as file:
        magic = file.read(len(_MAGIC))
        if magic != _MAGIC[: len(magic)]:
            raise ValueError(f"{path} is not a journal of the training service; choose another directory")
        while len(frame := file.read(_FRAME.size)) == _FRAME.size:
            header_bytes, body_bytes, checksum = _FRAME.unpack(frame)
            header, body = file.read(header_bytes), file.read(body_bytes)
            if len(header) < header_bytes or len(body) < body_bytes or zlib.crc32(body, zlib.crc32(header)) != checksum:
                return
            yield file.tell(), Record(json.loads(header), body)

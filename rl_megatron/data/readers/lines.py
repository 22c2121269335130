"""Read JSON lines and plain text, compressed with gzip or not."""

from __future__ import annotations

import codecs
import gzip
import json
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from rl_megatron.data.records import Position, Reader, Record, without_nulls


class TextLine(Record):
    """A line of a plain text, with its line end, under `text`."""


class Lines(Reader):
    """The lines of a UTF-8 file. A position is the offset in bytes, uncompressed, and the number of lines before.

    A byte order mark at the beginning, which editors on Windows write, is not a part of the text.
    """

    def __init__(self, file: Path):
        self.file, self.name = file, str(file)

    def read(self, start: Position = ()) -> Iterator[tuple[Record, Position]]:
        """Yield the record of each line from `start` on, with the position after it."""
        offset, number = start or (0, 0)
        try:
            with self._open() as file:
                file.seek(offset)
                for line in file:
                    number += 1
                    offset += len(line)
                    record = self._record(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line, number)
                    if record is not None:
                        yield record, (offset, number)
        except (gzip.BadGzipFile, EOFError) as error:
            raise ValueError(f"{self.file} cannot be read as gzip ({error}): write it again.") from error

    def _open(self) -> BinaryIO:
        return cast(BinaryIO, gzip.open(self.file)) if self.file.suffix == ".gz" else self.file.open("rb")

    def _text(self, line: bytes, number: int) -> str:
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self.file}:{number} is not UTF-8 ({error.reason} at byte {error.start}).") from error

    @abstractmethod
    def _record(self, line: bytes, number: int) -> Record | None:
        """Return the record of a line, or None if it has none."""


class JsonLines(Lines):
    """JSON lines: one object per line. Blank lines are skipped."""

    def _record(self, line: bytes, number: int) -> Record | None:
        if not line.strip():
            return None
        text = self._text(line, number)
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            whole = " (a file of one JSON array must be written with one object per line)" if text[0] == "[" else ""
            raise ValueError(f"{self.file}:{number} is not JSON ({error.msg}, column {error.colno}){whole}.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{self.file}:{number} is a {type(values).__name__}; each line must be a JSON object.")
        if "\\u" in text:
            _check_characters(values, f"{self.file}:{number}")
        return Record(without_nulls(values), f"{self.file}:{number}")


def _check_characters(values: dict[str, Any], location: str) -> None:
    """Check that the escapes of a line are characters: half of a surrogate pair is none, and no tokenizer takes it."""
    for key, value in values.items():
        try:
            json.dumps([key, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{location}: field {key!a} has half of a surrogate pair, \\u{ord(error.object[error.start]):04x}; "
                "write the whole pair, or leave it out."
            ) from error


class TextLines(Lines):
    """Plain text, one record per line."""

    def _record(self, line: bytes, number: int) -> Record:
        return TextLine({"text": self._text(line, number)}, f"{self.file}:{number}")

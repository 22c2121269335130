"""Readers of data files: JSON lines, plain text, Parquet and Hugging Face data sets, on disk and on the Hub.

Lines and text may be compressed with gzip. None of the readers imports torch.
"""

from __future__ import annotations

import codecs
import gzip
import json
import logging
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

from rl_megatron import log
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.records import Position, Reader, Record, drop_nulls


class TextLine(Record):
    """The record of a line of plain text; its field `text` is the line, including the line end."""


class Lines(Reader):
    """The lines of a UTF-8 file. A position has the offset in uncompressed bytes, and the number of lines before it.

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
        """Return the record of a line, or None if the line is skipped."""


class JsonLines(Lines):
    """JSON lines: one object per line. Blank lines are skipped."""

    def _record(self, line: bytes, number: int) -> Record | None:
        if not line.strip():
            return None
        text = self._text(line, number)
        try:
            values = json.loads(text.rstrip())  # an error at the end then has the column of the end
        except json.JSONDecodeError as error:
            whole = " (a file of one JSON array must be written with one object per line)" if text[0] == "[" else ""
            raise ValueError(f"{self.file}:{number} is not JSON ({error.msg}, column {error.colno}){whole}.") from error
        if not isinstance(values, dict):
            raise ValueError(f"{self.file}:{number} is a {type(values).__name__}; each line must be a JSON object.")
        if "\\u" in text:
            _check_characters(values, f"{self.file}:{number}")
        return Record(drop_nulls(values), f"{self.file}:{number}")


def _check_characters(values: Mapping[str, object], location: str) -> None:
    """Check that no escape in a line is half of a surrogate pair, which no tokenizer accepts."""
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


_ROWS = 1024  # rows that are converted to Python objects at once
_SECONDS_FOR_THE_HUB = 3.0  # how long the Hub may take to answer


class Parquet(Reader):
    """A Parquet file, read by row groups. A position is the number of rows before it."""

    def __init__(self, file: Path):
        self.file, self.name = file, str(file)
        arrow = _import_library("pyarrow", str(file))
        try:
            self._metadata = _parquet().read_metadata(file)
        except (OSError, arrow.ArrowException) as error:
            raise ValueError(f"{file} cannot be read as Parquet: {_first_line(error)}") from error

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return self._metadata.schema.to_arrow_schema().names

    def read(self, start: Position = ()) -> Iterator[tuple[Record, Position]]:
        """Yield each row from `start` on, with the position after it."""
        (skipped,), row = start or (0,), 0
        arrow = _import_library("pyarrow", str(self.file))
        try:
            with _parquet().ParquetFile(self.file) as table:
                for group in range(table.num_row_groups):
                    group_rows = table.metadata.row_group(group).num_rows
                    if row + group_rows <= skipped:
                        row += group_rows
                        continue
                    for batch in table.iter_batches(batch_size=_ROWS, row_groups=[group]):
                        rest = batch.slice(min(max(0, skipped - row), batch.num_rows))
                        row += batch.num_rows - rest.num_rows
                        for values in rest.to_pylist():
                            row += 1
                            yield Record(drop_nulls(values), f"{self.file}:{row}"), (row,)
        except (OSError, arrow.ArrowException) as error:
            raise ValueError(f"{self.file} cannot be read after row {row}: {_first_line(error)}") from error


class HuggingFaceDirectory(Reader):
    """A directory that `Dataset.save_to_disk` wrote. A position is the number of rows before it."""

    def __init__(self, directory: Path):
        self.name = str(directory)
        try:
            self._rows = _import_library("datasets", str(directory)).load_from_disk(str(directory))
        except (OSError, ValueError) as error:
            raise ValueError(f"{directory} cannot be read as a Hugging Face data set: {_first_line(error)}") from error

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return self._rows.column_names

    def read(self, start: Position = ()) -> Iterator[tuple[Record, Position]]:
        """Yield each row from `start` on, with the position after it."""
        (skipped,) = start or (0,)
        yield from _read_rows(_skip_rows(self._rows, skipped), self.name, skipped)


class HubDataset(Reader):
    """A split of a data set of the Hugging Face Hub, or of a directory that `datasets.load_dataset` reads.

    A position is the number of rows before it.

    Args:
        name: Its name, such as `openai/gsm8k`.
        subset: Its subset, which the Hub calls configuration; None if it has only one.
        split: Its split, such as `train` or `train[:1000]`.
        streaming: Whether rows are downloaded when they are read, instead of the whole data set first.
    """

    def __init__(self, name: str, subset: str | None, split: str, streaming: bool):
        self.name = f"{name} ({split})" if subset is None else f"{name} ({subset}, {split})"
        library = _import_hub_library(name)
        try:
            with _silence_retries():
                self._rows = library.load_dataset(name, subset, split=split, streaming=streaming)
        except Exception as error:  # the library raises errors of its own, of the network and of its readers
            raise ConfigError(f"{_name_keys(name, subset, split)} cannot be loaded: {_first_line(error)}") from error
        self._streaming = streaming

    @property
    def columns(self) -> list[str] | None:
        """Return the names of the columns, or None if they are not known."""
        return self._rows.column_names

    def read(self, start: Position = ()) -> Iterator[tuple[Record, Position]]:
        """Yield each row from `start` on, with the position after it."""
        (skipped,) = start or (0,)
        rest = self._rows.skip(skipped) if self._streaming else _skip_rows(self._rows, skipped)
        yield from _read_rows(rest, self.name, skipped)


def list_hub_splits(name: str, subset: str | None) -> list[str]:
    """Return the names of the splits of a data set."""
    library = _import_hub_library(name)
    try:
        with _silence_retries():
            return library.get_dataset_split_names(name, subset)
    except Exception as error:  # as in `HubDataset`
        offline = "; without a network, set data.path to local files" if _is_network_error(error) else ""
        raise ConfigError(f"{_name_keys(name, subset)} cannot be found: {_first_line(error)}{offline}") from error


def _skip_rows(rows: Any, skipped: int) -> Iterable[Mapping[str, Any]]:
    """Return the rows of a data set after the first `skipped` ones."""
    return rows.select(range(skipped, len(rows))) if skipped < len(rows) else ()


def _read_rows(rows: Iterable[Mapping[str, Any]], name: str, skipped: int) -> Iterator[tuple[Record, Position]]:
    for row, values in enumerate(rows, skipped + 1):
        yield Record(drop_nulls(values), f"{name}:{row}"), (row,)


def _import_library(name: str, needed_by: str) -> ModuleType:
    """Return the imported library, which must be installed."""
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{needed_by} needs the Python package {name}, which is not installed; pip install 'rl_megatron[data]'"
        ) from error


def _import_hub_library(needed_by: str) -> ModuleType:
    """Return the library `datasets`, in offline mode if the Hub does not answer.

    The library's own retries would take 23 seconds to find this out.
    """
    library = _import_library("datasets", needed_by)
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if not constants.HF_HUB_OFFLINE and not Path(needed_by).exists():
        try:
            get_session().head(constants.ENDPOINT, timeout=_SECONDS_FOR_THE_HUB)
        except Exception as error:  # of the library's HTTP client, whose errors have no common class
            log.once(
                f"the Hugging Face Hub does not answer ({constants.ENDPOINT}: {_first_line(error)}); only data that "
                "was downloaded before is used"
            )
            constants.HF_HUB_OFFLINE = library.config.HF_HUB_OFFLINE = True
    return library


@contextmanager
def _silence_retries() -> Iterator[None]:
    """Silence the lines that the Hub's library logs before each retry; the final error has the same message."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _parquet() -> ModuleType:
    import pyarrow.parquet

    return pyarrow.parquet


def _name_keys(name: str, subset: str | None, split: str | None = None) -> str:
    keys = {"dataset_name": name, "subset": subset, "split": split}
    return " ".join(f"data.{key}={value}" for key, value in keys.items() if value is not None)


def _is_network_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ConnectionError) or re.search(
            "offline|connect|reach", f"{type(error).__name__} {error}", re.I
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    """Return the first line of a library's error, or of the error that caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__

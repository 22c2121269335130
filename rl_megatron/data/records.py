"""`Record`, one object of a data file with its location, and `Reader`, the interface for reading records."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_megatron.log import track

Position = tuple[int, ...]  # where reading continues; only its reader knows what the numbers mean


class NothingLeft(ValueError):
    """The error for records that give no item to train on. A loader of streamed data skips a block that raises it."""


@dataclass(frozen=True)
class Record:
    """The fields of one record, and the location where it was read: `file:line`, or `file:row` of a table."""

    values: Mapping[str, Any]
    location: str


def drop_nulls(values: Mapping[str, object]) -> dict[str, object]:
    """Return a record's fields without those that are null or NaN.

    A null means that the field is missing: tables need a value in every row, and JSON files are often made from tables.
    Nulls are also dropped from mappings in lists, such as messages and tools. A field that is itself a mapping, such as
    verl's `extra_info`, keeps its nulls.
    """
    return {
        key: _drop_null_keys(value) if isinstance(value, list) else value
        for key, value in values.items()
        if not _is_null(value)
    }


def _drop_null_keys(value: object) -> object:
    if isinstance(value, dict):
        return {key: _drop_null_keys(inner) for key, inner in value.items() if not _is_null(inner)}
    return [_drop_null_keys(inner) for inner in value] if isinstance(value, list) else value


def _is_null(value: object) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


class Reader(ABC):
    """Records in a fixed order, which can be read from any position."""

    name: str  # the name in messages: the file, or the name on the Hub

    @abstractmethod
    def read(self, start: Position = ()) -> Iterator[tuple[Record, Position]]:
        """Yield each record from `start` on, with the position after it. `()` is the beginning.

        Raise ValueError, with the location, if a record cannot be read.
        """

    @property
    def columns(self) -> list[str] | None:
        """Return the names of the fields that every record has, or None if they are unknown before reading."""
        return None

    def all(self) -> list[Record]:
        """Return all records, at least one."""
        records = [record for record, _ in track(self.read(), f"records read from {self.name}")]
        if not records:
            raise ValueError(self.nothing)
        return records

    @property
    def nothing(self) -> str:
        """Return the error message for a reader without a record."""
        return f"{self.name} is empty: it has no records; add some, or set data.path to another file."


class Joined(Reader):
    """Several readers, one after the other, with the same columns if they are tables.

    The first number of a position is the index of the reader.
    """

    def __init__(self, readers: Sequence[Reader]):
        self.readers = list(readers)
        self.name = readers[0].name if len(readers) == 1 else f"{readers[0].name} and {len(readers) - 1} more"
        tables = [(reader.name, sorted(reader.columns)) for reader in readers if reader.columns is not None]
        for name, columns in tables[1:]:
            if columns != tables[0][1]:
                raise ValueError(
                    f"{name} has the columns {', '.join(columns)}, but {tables[0][0]} has {', '.join(tables[0][1])}: "
                    "files that are read as one need the same columns; list them under data.mix, each with its "
                    "columns."
                )

    def read(self, start: Position = ()) -> Iterator[tuple[Record, Position]]:
        """Yield each record from `start` on, with the position after it."""
        first, inner = (start[0], start[1:]) if start else (0, ())
        for number in range(first, len(self.readers)):
            for record, position in self.readers[number].read(inner if number == first else ()):
                yield record, (number, *position)

    @property
    def columns(self) -> list[str] | None:
        """Return the columns if all readers are tables, otherwise None."""
        return None if any(reader.columns is None for reader in self.readers) else self.readers[0].columns


class Renamed(Reader):
    """Another reader's records with fields under new names.

    Args:
        reader: The reader.
        names: New name → name in the records. A name with dots, such as `reward_model.ground_truth`, is a field in a
            mapping; the mapping itself is kept.
    """

    def __init__(self, reader: Reader, names: Mapping[str, str]):
        self._reader, self._names = reader, dict(names)
        self.name = reader.name

    def read(self, start: Position = ()) -> Iterator[tuple[Record, Position]]:
        """Yield each record from `start` on, with the position after it."""
        for record, position in self._reader.read(start):
            yield Record(self._rename(record), record.location), position

    def _rename(self, record: Record) -> dict[str, object]:
        renamed = {name: self._find_field(record, name, old_name) for name, old_name in self._names.items()}
        others = {name: value for name, value in record.values.items() if name not in self._names.values()}
        return others | renamed

    def _find_field(self, record: Record, name: str, old_name: str) -> object:
        if old_name in record.values:
            return record.values[old_name]
        value: object = record.values
        for part in old_name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise ValueError(
                    f"{record.location}: data.columns.{name}={old_name} names a field that the record does not have; "
                    f"its fields: {', '.join(record.values)}."
                )
            value = value[part]
        return value


class Part(Reader):
    """At most `limit` records of a reader, after its first `skipped` records, which are held out."""

    def __init__(self, reader: Reader, *, skipped: int = 0, limit: int | None = None):
        self._reader, self._skipped, self._limit = reader, skipped, limit
        self.name = reader.name

    def read(self, start: Position = ()) -> Iterator[tuple[Record, Position]]:
        """Yield each record from `start` on, with the position after it."""
        if start:
            yield from self._reader.read(start)  # a position is always after the skipped records
            return
        stop = None if self._limit is None else self._skipped + self._limit
        yield from itertools.islice(self._reader.read(), self._skipped, stop)

    @property
    def nothing(self) -> str:
        """Return the error message for a reader without records, or with all records held out."""
        if self._skipped == 0:
            return self._reader.nothing
        return (
            f"{self.name} has no records to train on: the first {self._skipped} are held out for evaluation, and it "
            "has no more; lower data.num_eval_examples, or set data.heldout_fraction=0 to hold nothing out."
        )

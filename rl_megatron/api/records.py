"""Data in memory: write records, such as those of a `datasets.Dataset`, to files that a run reads and checks."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from rl_megatron import disk
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import DataConfig

DataPath = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, Any]
Records = Iterable[Mapping[str, Any]]
Data = DataPath | Records

# The files are next to the output directory, not in it, because resume=false moves the output directory of an earlier
# run aside.
_SUFFIX = ".data"
_NAMES = {"path": "train", "eval_path": "eval"}  # keys of the section data -> beginnings of the names of their files


def take_records(data: Data | None, output_dir: Path) -> tuple[DataPath | None, dict[Path, Records]]:
    """Return `data` with paths of files in place of records, and the records of each file. Nothing is written.

    The name of a file has a digest of its records. So other records are another `data.path`, which a run that continues
    refuses, and no file is ever replaced.
    """
    if data is None or isinstance(data, str | os.PathLike):
        return data, {}
    is_section = isinstance(data, Mapping)
    section: dict[str, Any] = dict(cast(Mapping[str, Any], data)) if is_section else {"path": data}
    settings = {field.name for field in fields(DataConfig)} - _NAMES.keys()
    records = {
        key: value
        for key, value in section.items()
        if key not in settings
        and not (key not in _NAMES and isinstance(value, list | tuple))  # a setting of a plugin's data source
        and _are_records(value, f"data[{key!r}]" if is_section else "data")
    }
    if splits := [key for key in records if key not in _NAMES]:
        raise ConfigError(
            f"data has records in {', '.join(map(repr, splits))}, but only 'path' and 'eval_path' may have them; write "
            f'data={{"path": data[{splits[0]!r}]}}'
        )
    if not records:
        return cast(DataPath, data), {}
    output = output_dir if output_dir.name else output_dir.absolute()
    directory = output.with_name(output.name + _SUFFIX)
    files = {key: directory / f"{_NAMES[key]}-{_digest(value)}.jsonl" for key, value in records.items()}
    return section | {key: str(file) for key, file in files.items()}, {files[key]: records[key] for key in files}


def write_records(files: Mapping[Path, Records]) -> None:
    """Write the records of each file that does not exist as JSON lines.

    Every rank may call it at any time: a file appears as a whole, and all ranks write the same.
    """
    for file, records in files.items():
        if file.is_file():
            continue
        partial = file.with_name(f"{file.name}.{socket.gethostname()}-{os.getpid()}.incomplete")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                with partial.open("w", encoding="utf-8") as opened:
                    opened.writelines(_format(records))
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            cause = disk.describe(error, file)
            raise ConfigError(
                f"the records of data cannot be written to {file}: {cause}; choose another output_dir"
            ) from error


def _are_records(value: object, where: str) -> bool:
    """Return whether a value is records, and not a path, a list of paths or any other setting."""
    if isinstance(value, str | os.PathLike | Mapping) or not isinstance(value, Iterable):
        return False
    first = next(iter(value), None) if isinstance(value, Sized) else None
    if not isinstance(first, Mapping) and not isinstance(value, list | tuple):
        raise ConfigError(
            f"{where} is a {type(value).__name__}{'' if first is None else f' of {type(first).__name__}'}; pass a "
            "path, or records: a list of dictionaries or a datasets.Dataset that is not empty"
        )
    return isinstance(first, Mapping)


def _digest(records: Records) -> str:
    digest = hashlib.sha256()
    for line in _format(records):
        digest.update(line.encode())
    return digest.hexdigest()[:12]


def _format(records: Iterable[object]) -> Iterator[str]:
    """Yield a line for each record, in ASCII."""
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise ConfigError(f"record {number} of data is a {type(record).__name__}; records are dictionaries")
        try:
            yield json.dumps(dict(record), allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"record {number} of data cannot be written as JSON: {error}; leave out or convert such fields"
            ) from error

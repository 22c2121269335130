"""Data in memory: write records, such as those of a `datasets.Dataset`, to files that a run reads and checks.

A run continues from files alone, and a data file that was changed is noticed, so that records become files, too.
"""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from rl_megatron.api.model import do_on_rank0
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import DataConfig

Place = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, Any]
Records = Iterable[Mapping[str, Any]]
Data = Place | Records

# The files are next to the output directory, not in it, because resume=false moves the output directory of an earlier
# run aside.
_SUFFIX = ".data"
_FILES = {"path": "train.jsonl", "eval_path": "eval.jsonl"}  # keys of the section data -> files of their records


def take_records(data: Data | None, output_dir: Path) -> tuple[Place | None, dict[Path, Records]]:
    """Return `data` with paths of files in place of records, and the records of each file. Nothing is written."""
    if data is None or isinstance(data, str | os.PathLike):
        return data, {}
    is_section = isinstance(data, Mapping)
    section: dict[str, Any] = dict(cast(Mapping[str, Any], data)) if is_section else {"path": data}
    keys = {field.name for field in fields(DataConfig)} - _FILES.keys()
    records = {
        key: value
        for key, value in section.items()
        if key not in keys and _are_records(value, f"data[{key!r}]" if is_section else "data")
    }
    if splits := [key for key in records if key not in _FILES]:
        raise ConfigError(
            f"data has records in {', '.join(map(repr, splits))}, but only 'path' and 'eval_path' may have them; write "
            f'data={{"path": data[{splits[0]!r}]}}'
        )
    directory = output_dir.with_name(output_dir.name + _SUFFIX)
    files = {key: directory / _FILES[key] for key in records}
    if not files:
        return cast(Place, data), {}
    return section | {key: str(file) for key, file in files.items()}, {files[key]: records[key] for key in files}


def write_records(files: Mapping[Path, Records], device: str) -> None:
    """Write the records of each file as JSON lines. Collective under torchrun; rank 0 writes.

    `device` is the configuration's `device`, for which the process group is started.
    """

    def write() -> None:
        for file, records in files.items():
            _write(file, records)

    if files:
        do_on_rank0(write, device)


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


def _write(path: Path, records: Records) -> None:
    """Write a file as a whole. A file with the same content is left as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.incomplete")
    try:
        with partial.open("w", encoding="utf-8") as file:
            for number, record in enumerate(records):
                file.write(_format_record(record, number) + "\n")
        if not (path.is_file() and filecmp.cmp(partial, path, shallow=False)):
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _format_record(record: object, number: int) -> str:
    if not isinstance(record, Mapping):
        raise ConfigError(f"record {number} of data is a {type(record).__name__}; records are dictionaries")
    try:
        return json.dumps(dict(record), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"record {number} of data cannot be written as JSON: {error}; leave out or convert such fields"
        ) from error

"""Files: what `data.path` names, read and split into training and held-out.

JSONL becomes records that know their file and line; plain text stays one string.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rl_megatron.data.order import epoch_order

ItemT = TypeVar("ItemT")

# A constant, not the run's seed: another seed must not train on rows that an earlier run held out.
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Record:
    """One JSON object and where it was read, as `file:line`."""

    values: Mapping[str, Any]
    location: str


def existing_path(path: str | os.PathLike[str]) -> Path:
    """`path`, or FileNotFoundError naming it and the key that set it."""
    found = Path(path).expanduser()
    if not found.exists():
        raise FileNotFoundError(f"data.path: nothing at {found.absolute()}: set data.path to a file or a directory.")
    return found


def read_jsonl(path: str | os.PathLike[str]) -> list[Record]:
    """The objects of a JSONL file, in order; blank lines are skipped.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: not UTF-8, a line that is no JSON object (named as file:line), or no record at all.
    """
    file = existing_path(path)
    if file.is_dir():
        raise ValueError(f"data.path: {file} is a directory, a .jsonl file is needed here.")
    records: list[Record] = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}:{number}: not UTF-8 ({error.reason} at byte {error.start}).") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}:{number}: not JSON ({error.msg}, column {error.colno}).") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file}:{number}: a {type(values).__name__}, each line must be a JSON object.")
        records.append(Record(values, f"{file}:{number}"))
    if not records:
        raise ValueError(f"data.path: {file} has no records: it needs one JSON object per line.")
    return records


def load_records(path: str | os.PathLike[str], heldout_fraction: float = 0.05) -> tuple[list[Record], list[Record]]:
    """(Training, held-out) records of `data.path`.

    A directory is read as `train.jsonl` and `test.jsonl`. Of a single file, `heldout_fraction` is set aside: always the
    same rows for the same file, whatever the run's seed.

    Raises:
        FileNotFoundError: the path or, in a directory, one of the two files is missing.
        ValueError: what `read_jsonl` and `split_heldout` raise.
    """
    source = existing_path(path)
    if not source.is_dir():
        return split_heldout(read_jsonl(source), heldout_fraction)
    names = [entry.name for entry in sorted(source.iterdir())]
    for name in ("train.jsonl", "test.jsonl"):
        if name not in names:
            raise FileNotFoundError(
                f"data.path: {source} has no {name}: a data directory holds train.jsonl and test.jsonl (found: "
                f"{', '.join(names[:10]) or 'nothing'}); or name one .jsonl file, of which a fraction is held out."
            )
    return read_jsonl(source / "train.jsonl"), read_jsonl(source / "test.jsonl")


def load_text(path: str | os.PathLike[str], heldout_fraction: float = 0.05) -> tuple[str, str]:
    """(Training, held-out) text of the file at `data.path`: the tail is held out, from the first line start at or
    behind the cut. Characters are the file's own (line ends are not translated); the two parts joined are the file.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: a directory, an empty file, not UTF-8, a fraction outside [0, 1), or a part without text.
    """
    check_fraction(heldout_fraction)
    file = existing_path(path)
    if file.is_dir():
        texts = sorted(entry.name for entry in file.iterdir())[:10]
        raise ValueError(f"data.path: {file} is a directory, text needs one file; it holds {', '.join(texts)}.")
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: {file} is not UTF-8 ({error.reason} at byte {error.start}).") from error
    if not text.strip():
        raise ValueError(f"data.path: {file} is empty.")
    if heldout_fraction == 0:
        return text, ""
    cut = min(round(len(text) * (1 - heldout_fraction)), len(text) - 1)
    line_start = text.find("\n", cut - 1) + 1 if cut > 0 else 0
    cut = line_start if 0 < line_start < len(text) else cut  # a last line without an end is cut where it is
    if cut == 0:
        raise ValueError(
            f"data.path: {file} has {len(text)} characters: holding {heldout_fraction} of them out leaves nothing to "
            f"train on."
        )
    return text[:cut], text[cut:]


def split_heldout(items: Sequence[ItemT], heldout_fraction: float) -> tuple[list[ItemT], list[ItemT]]:
    """(Training, held-out) items, both in their order: a fixed random choice of `heldout_fraction`, at least one.

    A fraction of 0 holds nothing out.

    Raises:
        ValueError: a fraction outside [0, 1), or one that leaves nothing to train on.
    """
    check_fraction(heldout_fraction)
    num_heldout = max(1, round(len(items) * heldout_fraction)) if heldout_fraction > 0 else 0
    if num_heldout >= len(items):
        raise ValueError(
            f"holding {num_heldout} of {len(items)} items out (fraction {heldout_fraction}) leaves nothing to train "
            f"on: lower the fraction, or provide more data."
        )
    heldout = set(epoch_order(len(items), _SPLIT_SEED, epoch=0)[:num_heldout].tolist())
    return (
        [item for number, item in enumerate(items) if number not in heldout],
        [item for number, item in enumerate(items) if number in heldout],
    )


def check_fraction(heldout_fraction: float) -> None:
    if not 0 <= heldout_fraction < 1:
        raise ValueError(f"heldout_fraction = {heldout_fraction}: it must be at least 0 and below 1.")

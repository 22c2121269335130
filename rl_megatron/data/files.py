"""Read the files at `data.path`, and split them into a training and a held-out part.

JSONL becomes records, which keep their file and line for messages; plain text stays one string.
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

# This is not the run's seed, so that a run with another seed does not train on what an earlier run held out.
_SPLIT_SEED = 0


@dataclass(frozen=True)
class Record:
    """One JSON object and the place where it was read, as `file:line`."""

    values: Mapping[str, Any]
    location: str


def existing_path(path: str | os.PathLike[str]) -> Path:
    """Return `path`, with `~` expanded.

    Raises:
        FileNotFoundError: There is no file or directory at `path`; the message names it and the key `data.path`.
    """
    expanded = Path(path).expanduser()
    if not expanded.exists():
        raise FileNotFoundError(
            f"data.path: there is nothing at {expanded.absolute()}: set data.path to a file or a directory."
        )
    return expanded


def read_jsonl(path: str | os.PathLike[str]) -> list[Record]:
    """Return the objects of a JSONL file, in order; blank lines are skipped.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: The file is not UTF-8, a line is not a JSON object (the message names it as file:line), or there is
            no record.
    """
    file = existing_path(path)
    if file.is_dir():
        raise ValueError(f"data.path: {file} is a directory, and a .jsonl file is needed; set data.path to a file.")
    records: list[Record] = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}:{number} is not UTF-8 ({error.reason} at byte {error.start}).") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}:{number} is not JSON ({error.msg}, column {error.colno}).") from error
        if not isinstance(values, dict):
            raise ValueError(f"{file}:{number} is a {type(values).__name__}; each line must be a JSON object.")
        records.append(Record(values, f"{file}:{number}"))
    if not records:
        raise ValueError(f"data.path: {file} has no records: it needs one JSON object per line.")
    return records


def load_records(path: str | os.PathLike[str], heldout_fraction: float = 0.05) -> tuple[list[Record], list[Record]]:
    """Return the (training, held-out) records of `data.path`.

    A directory is read as `train.jsonl` and `test.jsonl`. Of a single file, `heldout_fraction` is held out: always the
    same records of the same file, independent of the run's seed.

    Raises:
        FileNotFoundError: The path or, in a directory, one of the two files does not exist.
        ValueError: `read_jsonl` or `split_heldout` raises it.
    """
    source = existing_path(path)
    if not source.is_dir():
        return split_heldout(read_jsonl(source), heldout_fraction)
    names = [entry.name for entry in sorted(source.iterdir())]
    for name in ("train.jsonl", "test.jsonl"):
        if name not in names:
            raise FileNotFoundError(
                f"data.path: {source} has no {name}: a data directory holds train.jsonl and test.jsonl (found: "
                f"{', '.join(names[:10]) or 'nothing'}); add it, or set data.path to one .jsonl file, of which a "
                "fraction is held out."
            )
    return read_jsonl(source / "train.jsonl"), read_jsonl(source / "test.jsonl")


def load_text(path: str | os.PathLike[str], heldout_fraction: float = 0.05) -> tuple[str, str]:
    """Return the (training, held-out) text of the file at `data.path`.

    The end of the file is held out, from the first line that starts at or after the cut. The two parts joined are the
    file, character by character; line ends are not translated.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: The path is a directory, the file is empty or not UTF-8, the fraction is outside [0, 1), or there is
            nothing left to train on.
    """
    check_fraction(heldout_fraction)
    file = existing_path(path)
    if file.is_dir():
        texts = sorted(entry.name for entry in file.iterdir())[:10]
        raise ValueError(
            f"data.path: {file} is a directory (with {', '.join(texts)}), and a text file is needed; set data.path to "
            "one."
        )
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: {file} is not UTF-8 ({error.reason} at byte {error.start}).") from error
    if not text.strip():
        raise ValueError(f"data.path: {file} is empty; set data.path to a file with text.")
    if heldout_fraction == 0:
        return text, ""
    cut = min(round(len(text) * (1 - heldout_fraction)), len(text) - 1)
    line_start = text.find("\n", cut - 1) + 1 if cut > 0 else 0
    cut = line_start if 0 < line_start < len(text) else cut  # no line starts after the cut: cut within the last line
    if cut == 0:
        raise ValueError(
            f"data.path: {file} has {len(text)} characters: holding {heldout_fraction} of them out leaves nothing to "
            f"train on; lower data.heldout_fraction, or provide more text."
        )
    return text[:cut], text[cut:]


def split_heldout(items: Sequence[ItemT], heldout_fraction: float) -> tuple[list[ItemT], list[ItemT]]:
    """Return the (training, held-out) items, both in their original order.

    The held-out items are a fixed random choice of `heldout_fraction`, at least one. A fraction of 0 holds nothing out.

    Raises:
        ValueError: The fraction is outside [0, 1), or it leaves nothing to train on.
    """
    check_fraction(heldout_fraction)
    if heldout_fraction == 0:
        return list(items), []
    num_heldout = max(1, round(len(items) * heldout_fraction))
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
    """Check a held-out fraction.

    Raises:
        ValueError: It is outside [0, 1).
    """
    if not 0 <= heldout_fraction < 1:
        raise ValueError(f"heldout_fraction = {heldout_fraction} must be at least 0 and below 1.")

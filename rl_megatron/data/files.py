"""Find the files of a data section, read them as a whole, and split them into a training and a held-out part.

Files of records become records, which have their location for messages; a plain text file becomes one string.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rl_megatron import log
from rl_megatron.config.data_sources import require_place
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.schema import DataConfig
from rl_megatron.data.order import epoch_order
from rl_megatron.data.readers import HubDataset, HuggingFaceDirectory, JsonLines, Parquet, TextLines, list_hub_splits
from rl_megatron.data.records import Joined, Reader, Record, Renamed

# Names of held-out splits; the first one that a directory or a data set has is used.
HELDOUT_SPLITS = ("test", "validation", "val", "eval", "dev")
TRAIN_SPLIT = "train"
# The split, a number such as -00000-of-00002, and the suffix of a data file.
_DATA_FILE = re.compile(r"(?P<split>.+?)(?P<part>-\d+(-of-\d+)?)?(?P<suffix>\.(jsonl|ndjson|json|parquet|txt))(\.gz)?")
_JSON = (".jsonl", ".ndjson", ".json")
_GLOB = re.compile(r"[*?\[]")
_NUM_NAMES_SHOWN = 10
UNNAMED = ("the data", "data.num_eval_examples")  # the names for `split_heldout` if no section is known

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Files:
    """The training and the held-out files. A directory among them is a Hugging Face data set.

    If there are no held-out files, a part of the training data is held out.
    """

    train: list[Path]
    heldout: list[Path]


@dataclass(frozen=True)
class Parts:
    """The readers of both parts; `heldout` is None if a part of the training data is held out."""

    train: Reader
    heldout: Reader | None


def find_parts(data: DataConfig, plain: Callable[[Path], Reader] = JsonLines, alone: Sequence[str] = ()) -> Parts:
    """Return the readers of the data that a section names, with fields renamed as in `data.columns`.

    Args:
        data: The section, which has `path` or `dataset_name`.
        plain: The reader of files whose suffix is neither that of JSON lines nor that of Parquet.
        alone: Names of files. If a directory has any of them, only the first one is read.
    """
    if data.dataset_name is not None:
        train, heldout = _build_hub_readers(data)
    else:
        files = find_files(require_path(data), data.split, data.eval_path, data.eval_split, alone)
        train, heldout = ([build_reader(file, plain) for file in part] for part in (files.train, files.heldout))
    return Parts(_join(train, data.columns), _join(heldout, data.columns) if heldout else None)


def find_files(
    path: PathLike | Sequence[PathLike],
    split: str | None = None,
    eval_path: PathLike | Sequence[PathLike] | None = None,
    eval_split: str | None = None,
    alone: Sequence[str] = (),
) -> Files:
    """Return the files at `data.path` and `data.eval_path`.

    A path is a file, a pattern such as `part-*.parquet`, or a directory. A directory is a Hugging Face data set, or has
    files that are named for their splits, such as `train.jsonl` and `test.jsonl`. Of any other directory, all data
    files are read.
    """
    files = Files([], [])
    for one_path in _list_paths(path):
        files_there = _find_files_at(one_path, split, eval_split, alone)
        files.train.extend(files_there.train)
        files.heldout.extend(files_there.heldout)
    if eval_path is not None:
        heldout = [_find_files_at(p, eval_split, None, (), key="data.eval_path").train for p in _list_paths(eval_path)]
        return Files(files.train, [file for part in heldout for file in part])
    if split is not None and not any(Path(one_path).expanduser().is_dir() for one_path in _list_paths(path)):
        raise ValueError(
            f"data.split={split} has no effect: {path} is a file; remove it, or set data.path to a directory."
        )
    if eval_split is not None and not files.heldout:
        raise ValueError(f"data.eval_split={eval_split} has no effect: {path} has no splits; set data.eval_path.")
    return files


def require_existing(path: PathLike, key: str = "data.path") -> Path:
    """Return `path`, with `~` expanded; raise FileNotFoundError if it does not exist."""
    expanded = Path(path).expanduser()
    if not expanded.exists():
        raise FileNotFoundError(
            f"{key}: there is nothing at {expanded.absolute()}: set {key} to a file or a directory."
        )
    return expanded


def require_path(data: DataConfig) -> str | tuple[str, ...]:
    """Return `data.path`, which must be set."""
    require_place(data)
    assert data.path is not None
    return data.path


def build_reader(file: Path, plain: Callable[[Path], Reader] = JsonLines) -> Reader:
    """Return the reader of a directory, a JSON lines file or a Parquet file, and `plain(file)` for any other file."""
    if file.is_dir():
        return HuggingFaceDirectory(file)
    suffix = Path(file.name.removesuffix(".gz")).suffix
    if suffix == ".parquet":
        return Parquet(file)
    return JsonLines(file) if suffix in _JSON else plain(file)


def is_plain_text(file: Path) -> bool:
    """Return whether a file is plain text, which `build_reader` reads with its argument `plain`."""
    return isinstance(build_reader(file, TextLines), TextLines)


def _join(readers: list[Reader], columns: Mapping[str, str]) -> Reader:
    reader = Joined(readers)
    return Renamed(reader, columns) if columns else reader


def _build_hub_readers(data: DataConfig) -> tuple[list[Reader], list[Reader]]:
    assert data.dataset_name is not None
    splits = list_hub_splits(data.dataset_name, data.subset)
    train = data.split or TRAIN_SPLIT
    heldout = data.eval_split or next((name for name in HELDOUT_SPLITS if name in splits and name != train), None)
    for key, name in (("split", train), ("eval_split", heldout)):
        if name is not None and name.partition("[")[0] not in splits:
            raise ConfigError(
                f"data.{key}={name}: data.dataset_name={data.dataset_name} has no such split"
                f"{nearest(name.partition('[')[0], splits)}; set data.{key}"
            )
    if data.eval_path is not None:
        files = [file for path in _list_paths(data.eval_path) for file in _find_files_at(path, None, None, ()).train]
        return [_build_hub_reader(data, train)], [build_reader(file) for file in files]
    return [_build_hub_reader(data, train)], [] if heldout is None else [_build_hub_reader(data, heldout)]


def _build_hub_reader(data: DataConfig, split: str) -> Reader:
    assert data.dataset_name is not None
    return HubDataset(data.dataset_name, data.subset, split, data.streaming)


def _list_paths(path: PathLike | Sequence[PathLike]) -> list[PathLike]:
    return [path] if isinstance(path, (str, os.PathLike)) else list(path)


def _find_files_at(
    path: PathLike, split: str | None, eval_split: str | None, alone: Sequence[str], key: str = "data.path"
) -> Files:
    expanded = Path(path).expanduser()
    if _GLOB.search(str(path)) and not expanded.exists():
        return Files(_match_pattern(expanded, key), [])
    expanded = require_existing(path, key)
    if not expanded.is_dir() or (expanded / "state.json").is_file():  # a file, or a Hugging Face data set of one split
        return Files([expanded], [])
    splits = _find_splits(expanded)
    names = [name for name in alone if (expanded / name).is_file()]
    if names and split is None:
        return Files([expanded / names[0]], [])
    if split is None and TRAIN_SPLIT not in splits:
        return _take_all_files(expanded, splits, key)
    train = split or TRAIN_SPLIT
    heldout = eval_split or next((name for name in HELDOUT_SPLITS if name in splits and name != train), None)
    for which, name in (("split", train), ("eval_split", heldout)):
        if name is not None and name not in splits:
            raise ValueError(
                f"data.{which}={name}: {expanded} has no such split{nearest(name, splits)}; set data.{which}."
            )
    return Files(splits[train], splits[heldout] if heldout else [])


def _match_pattern(pattern: Path, key: str) -> list[Path]:
    anchor = Path(pattern.anchor or ".")
    files = sorted(anchor.glob(str(pattern.relative_to(anchor) if pattern.anchor else pattern)))
    if not files:
        raise FileNotFoundError(f"{key}: no file matches {pattern.absolute()}; set {key} to files that exist.")
    return files


def _find_splits(directory: Path) -> dict[str, list[Path]]:
    """Return the data of a directory by split; the split of a file is its name without number and suffix."""
    saved = directory / "dataset_dict.json"
    if saved.is_file():
        return {name: [directory / name] for name in json.loads(saved.read_text())["splits"]}
    splits: dict[str, list[Path]] = {}
    for file in sorted(directory.iterdir()):
        match = _DATA_FILE.fullmatch(file.name)
        if match is not None and file.is_file():
            splits.setdefault(match["split"], []).append(file)
    return splits


def _take_all_files(directory: Path, splits: Mapping[str, list[Path]], key: str) -> Files:
    """Return all data files of a directory, which has no training split, as training files."""
    names = ", ".join(sorted(entry.name for entry in directory.iterdir())[:_NUM_NAMES_SHOWN]) or "nothing"
    heldout = [name for name in HELDOUT_SPLITS if name in splits]
    if heldout and key == "data.path":
        raise FileNotFoundError(
            f"{key}: {directory} has {heldout[0]} data, and no {TRAIN_SPLIT} data (found: {names}); add it, or choose "
            "the training data with data.split."
        )
    files = [file for split_files in splits.values() for file in split_files]
    if not files:
        raise FileNotFoundError(
            f"{key}: {directory} has no data files (found: {names}); it needs .jsonl, .parquet or .txt files, such as "
            "train.jsonl and test.jsonl."
        )
    return Files(sorted(files), [])


ItemT = TypeVar("ItemT")

# This is not the run's seed, so that a run with another seed does not train on what an earlier run held out.
_SPLIT_SEED = 0


def load_records(
    path: PathLike | Sequence[PathLike], heldout_fraction: float = 0.05
) -> tuple[list[Record], list[Record]]:
    """Return the (training, held-out) records of `data.path`, which `find_files` describes.

    If it has no held-out files, `heldout_fraction` of the records is held out. The choice depends on the files, but not
    on the run's seed.
    """
    files = find_files(path)
    train, heldout = (
        Joined([build_reader(file) for file in part]).all() if part else [] for part in (files.train, files.heldout)
    )
    return (train, heldout) if files.heldout else split_heldout(train, heldout_fraction)


def load_text(file: Path, heldout_fraction: float = 0.05) -> tuple[str, str]:
    """Return the (training, held-out) text of a file.

    The end of the file is held out: about `heldout_fraction` of its characters, from the start of a line on if
    possible. The two parts joined are the file's text, with its line ends unchanged.
    """
    check_fraction(heldout_fraction)
    text = "".join(record.values["text"] for record, _ in TextLines(file).read())
    if not text.strip():
        raise ValueError(f"data.path: {file} is empty; set data.path to a file with text.")
    if heldout_fraction == 0:
        return text, ""
    cut = min(round(len(text) * (1 - heldout_fraction)), len(text) - 1)
    line_start = text.find("\n", cut - 1) + 1 if cut > 0 else 0
    cut = line_start if 0 < line_start < len(text) else cut  # cut within the last line if no line starts later
    if cut == 0:
        raise ValueError(
            f"data.path: {file} has {len(text)} characters: holding {heldout_fraction} of them out leaves nothing to "
            f"train on; lower data.heldout_fraction, or provide more text."
        )
    return text[:cut], text[cut:]


def split_heldout(
    items: Sequence[ItemT],
    heldout_fraction: float,
    wanted: int = 0,
    size: Callable[[ItemT], int] = lambda item: 1,
    names: tuple[str, str] = UNNAMED,
) -> tuple[list[ItemT], list[ItemT]]:
    """Return the (training, held-out) items, both in their original order.

    The held-out items are the first of a fixed random order: `heldout_fraction` of all items, at least one, and more
    until they have `wanted` records. A fraction of 0 holds nothing out.

    Args:
        items: The items.
        heldout_fraction: The share of the items that is held out.
        wanted: The number of records that evaluation asks for, `data.num_eval_examples`; 0 if it uses any number.
        size: Returns the number of records of an item.
        names: The names, in messages, of the data and of the setting of `wanted`.
    """
    check_fraction(heldout_fraction)
    if heldout_fraction == 0:
        return list(items), []
    by_fraction = num_heldout = max(1, round(len(items) * heldout_fraction))
    order = epoch_order(len(items), _SPLIT_SEED, epoch=0).tolist()
    held = sum(size(items[number]) for number in order[:num_heldout])
    while held < wanted and num_heldout < len(items):
        held += size(items[order[num_heldout]])
        num_heldout += 1
    if num_heldout >= len(items):
        source, asked = names
        setting = f"data.heldout_fraction={heldout_fraction}" if num_heldout == by_fraction else asked
        num_records = sum(map(size, items))
        raise ConfigError(
            f"{setting} leaves nothing to train on: {source} has {num_records} record{'s' if num_records > 1 else ''}; "
            "lower it, provide more records, or set data.eval_path to other data"
        )
    if num_heldout > by_fraction:
        log.once(
            f"data.num_eval_examples holds {num_heldout} of {len(items)} items out of training; "
            f"data.heldout_fraction={heldout_fraction} would have held out {by_fraction}"
        )
    heldout = set(order[:num_heldout])
    return (
        [item for number, item in enumerate(items) if number not in heldout],
        [item for number, item in enumerate(items) if number in heldout],
    )


def check_fraction(heldout_fraction: float) -> None:
    """Check that a held-out fraction is in [0, 1)."""
    if not 0 <= heldout_fraction < 1:
        raise ValueError(f"heldout_fraction = {heldout_fraction} must be at least 0 and below 1.")

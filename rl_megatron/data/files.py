"""Read the files at `data.path` as a whole, and split them into a training and a held-out part.

Files of records become records, which keep their place for messages; plain text stays one string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rl_megatron import log
from rl_megatron.data.order import epoch_order
from rl_megatron.data.readers.lines import TextLines
from rl_megatron.data.readers.places import Place, find_files, reader_of
from rl_megatron.data.records import Joined, Record

ItemT = TypeVar("ItemT")

# This is not the run's seed, so that a run with another seed does not train on what an earlier run held out.
_SPLIT_SEED = 0


def load_records(path: Place | Sequence[Place], heldout_fraction: float = 0.05) -> tuple[list[Record], list[Record]]:
    """Return the (training, held-out) records of `data.path`, which `find_files` describes.

    If it has no held-out files, `heldout_fraction` of the records is held out: always the same records of the same
    files, independent of the run's seed.

    Raises:
        FileNotFoundError: There is nothing at a path.
        ValueError: A record cannot be read, there is none, or `split_heldout` raises it.
    """
    files = find_files(path)
    train, heldout = (
        Joined([reader_of(file) for file in part]).all() if part else [] for part in (files.train, files.heldout)
    )
    return (train, heldout) if files.heldout else split_heldout(train, heldout_fraction)


def load_text(file: Path, heldout_fraction: float = 0.05) -> tuple[str, str]:
    """Return the (training, held-out) text of a file.

    The end of the file is held out, from the first line that starts at or after the cut. The two parts joined are the
    file, character by character; line ends are not translated.

    Raises:
        ValueError: The file is empty or not UTF-8, the fraction is outside [0, 1), or there is nothing left to train
            on.
    """
    check_fraction(heldout_fraction)
    text = "".join(record.values["text"] for record, _ in TextLines(file).read())
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


def split_heldout(
    items: Sequence[ItemT], heldout_fraction: float, wanted: int = 0, size: Callable[[ItemT], int] = lambda item: 1
) -> tuple[list[ItemT], list[ItemT]]:
    """Return the (training, held-out) items, both in their original order.

    The held-out items are the first of a fixed random order: `heldout_fraction` of them, at least one, and as many more
    as hold `wanted` records. A fraction of 0 holds nothing out.

    Args:
        items: The items.
        heldout_fraction: The share of the items that is held out.
        wanted: How many records evaluation asks for, `data.num_eval_examples`; 0: as many as there are.
        size: How many records an item holds.

    Raises:
        ValueError: The fraction is outside [0, 1), or what is held out leaves nothing to train on.
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
        remedy = "lower the fraction" if num_heldout == by_fraction else "lower data.num_eval_examples"
        raise ValueError(
            f"holding {num_heldout} of {len(items)} items out (fraction {heldout_fraction}) leaves nothing to train "
            f"on: {remedy}, or provide more data."
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
    """Check a held-out fraction.

    Raises:
        ValueError: It is outside [0, 1).
    """
    if not 0 <= heldout_fraction < 1:
        raise ValueError(f"heldout_fraction = {heldout_fraction} must be at least 0 and below 1.")

"""Read preference pairs: one prompt with a chosen and a rejected answer. `preferences.py` makes batches of them.

`load_preferences` reads pairs from JSONL in one of two forms:

- Pairs: every record has the prompt's fields and the strings `chosen` and `rejected`.
- Graded solutions: a record has the prompt's fields and any number of graded solutions. A graded solution is a value
  that is a mapping with `is_correct` (true or false) and `solution` (a string). Each right solution forms a pair with
  each wrong solution of the same record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_megatron import log
from rl_megatron.config.errors import nearest
from rl_megatron.data.files import Record, existing_path, read_jsonl, split_heldout
from rl_megatron.data.templates import require_fields

_SIDES = ("chosen", "rejected")
_SINGLE_FILES = ("preferences.jsonl", "model_solutions.jsonl")  # a directory's first file with one of these names
_SPLIT_FILES = ("train.jsonl", "test.jsonl")
_NUM_NAMES_SHOWN = 10
_PAIR, _GRADED = "a pair", "graded solutions"  # the forms of a record


def answer_records(record: Record) -> tuple[Record, Record]:
    """Return the record twice, with the chosen and with the rejected text as its `answer`, for an answer template."""
    chosen, rejected = (Record({**record.values, "answer": record.values[side]}, record.location) for side in _SIDES)
    return chosen, rejected


def load_preferences(
    path: str | os.PathLike[str], heldout_fraction: float = 0.05, prompt_template: str = "{question}\n"
) -> tuple[list[Record], list[Record]]:
    """Return the (training, held-out) pairs of `data.path`.

    A pair is a record with the fields of the prompt, `chosen` and `rejected`. In a directory, `preferences.jsonl` is
    read, or else `model_solutions.jsonl`, or else `train.jsonl` and `test.jsonl`. Of a single file, `heldout_fraction`
    of the prompts is held out, each with all its pairs: always the same prompts of the same file, independent of the
    run's seed. Graded records without a right or without a wrong solution are left out, and their number is logged.

    Raises:
        FileNotFoundError: There is nothing at `path`, or a directory has no preferences.
        ValueError: `read_jsonl` or `split_heldout` raises it; or, named as file:line, a record has neither form or
            another form than those before it, `chosen` or `rejected` is missing, empty or not a string, the two are
            equal, a graded solution is malformed, empty or graded both right and wrong, or a record lacks a field of
            `prompt_template`.
    """
    source = existing_path(path)
    if not source.is_dir():
        return _split_by_prompt(_pairs(read_jsonl(source)), heldout_fraction, prompt_template)
    names = sorted(entry.name for entry in source.iterdir())
    for name in _SINGLE_FILES:
        if name in names:
            return _split_by_prompt(_pairs(read_jsonl(source / name)), heldout_fraction, prompt_template)
    if set(_SPLIT_FILES) <= set(names):
        train, heldout = (read_jsonl(source / name) for name in _SPLIT_FILES)
        if any(map(_form, train)):
            return _pairs(train), _pairs(heldout)
    raise FileNotFoundError(
        f"data.path: {source} has no {', no '.join(_SINGLE_FILES)}, and no {' with '.join(_SPLIT_FILES)} whose records "
        f"have 'chosen' and 'rejected' (found: {', '.join(names[:_NUM_NAMES_SHOWN]) or 'nothing'}); add one of them, "
        f"or set data.path to a .jsonl file."
    )


def _split_by_prompt(
    pairs: Sequence[Record], heldout_fraction: float, prompt_template: str
) -> tuple[list[Record], list[Record]]:
    """Split the pairs so that all pairs of a prompt are on the same side: a held-out prompt is never trained on."""
    require_fields(pairs, prompt_template)
    by_prompt: dict[str, list[Record]] = {}
    for pair in pairs:
        by_prompt.setdefault(prompt_template.format_map(pair.values), []).append(pair)
    train, heldout = split_heldout(list(by_prompt.values()), heldout_fraction)
    return [pair for group in train for pair in group], [pair for group in heldout for pair in group]


def _pairs(records: Sequence[Record]) -> list[Record]:
    """Return the pairs of one file. The first record with a form decides the form of the file."""
    first = next(filter(_form, records), records[0])
    form = _form(first)
    if form is None:
        raise ValueError(
            f"{first.location} has no preference, nor has any other record: its fields are {sorted(first.values)}; a "
            f"record needs 'chosen' and 'rejected', or graded solutions, mappings with 'is_correct' and 'solution'."
        )
    for record in records:
        if _form(record) not in (form, None):
            raise ValueError(
                f"{record.location} has {_form(record)}, in a file that begins with {form} ({first.location}): "
                "use two files."
            )
    if form == _PAIR:
        for record in records:
            check_pair(record)
        return list(records)
    pairs = [list(_pairs_of_solutions(record)) for record in records]
    num_left_out = pairs.count([])
    file = first.location.rpartition(":")[0]
    if num_left_out == len(pairs):
        raise ValueError(f"{file}: no question has both a right and a wrong solution, so there is no pair to learn.")
    if num_left_out:
        log.once(
            f"{file}: {num_left_out} of {len(pairs)} questions are left out, because they have no right or no wrong "
            "solution"
        )
    return [pair for of_question in pairs for pair in of_question]


def _form(record: Record) -> str | None:
    """Return the form of one record, or None if it has no answer of either form, such as a question without answers."""
    if any(side in record.values for side in _SIDES):
        return _PAIR
    return _GRADED if any(map(_is_graded, record.values.values())) else None


def _is_graded(value: Any) -> bool:
    return isinstance(value, Mapping) and "is_correct" in value


def check_pair(record: Record) -> None:
    """Check that a record has `chosen` and `rejected`, two different texts.

    Raises:
        ValueError: It has not; the message names file:line.
    """
    for side in _SIDES:
        if side not in record.values:
            raise ValueError(f"{record.location}: the pair has no {side!r}{nearest(side, record.values)}")
        _check_text(record, side, record.values[side])
    if record.values["chosen"] == record.values["rejected"]:
        raise ValueError(
            f"{record.location}: 'chosen' and 'rejected' are equal, so neither can be preferred: remove the pair."
        )


def _check_text(record: Record, key: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{record.location}: {key!r} is a {type(text).__name__}; it must be a string.")
    if not text.strip():
        raise ValueError(f"{record.location}: {key!r} is empty: fill it in, or remove it.")


def _pairs_of_solutions(record: Record) -> Iterator[Record]:
    """Yield a pair for each right and each wrong solution, in the record's order; equal texts count once."""
    solutions = {key: value for key, value in record.values.items() if _is_graded(value)}
    grades: dict[str, bool] = {}
    for key, graded in solutions.items():
        if not isinstance(graded["is_correct"], bool) or "solution" not in graded:
            raise ValueError(f"{record.location}: {key!r} needs 'is_correct', true or false, and 'solution', a string.")
        text = graded["solution"]
        _check_text(record, f"{key}.solution", text)
        if grades.setdefault(text, graded["is_correct"]) != graded["is_correct"]:
            raise ValueError(
                f"{record.location}: the text of {key!r} is graded right and wrong: remove one of the two."
            )
    fields = {key: value for key, value in record.values.items() if key not in solutions}
    for chosen in (text for text, right in grades.items() if right):
        for rejected in (text for text, right in grades.items() if not right):
            yield Record({**fields, "chosen": chosen, "rejected": rejected}, record.location)

"""Records of answers to compare: pairs of a chosen and a rejected answer, and single answers with a label.

Records hold pairs in two forms:

- A pair: every record has the prompt's fields, and `chosen` and `rejected`, which are strings or lists of messages (see
  `conversations.py`).
- Graded solutions: a record has the prompt's fields and any number of graded solutions. Each is a field whose value is
  a mapping with `is_correct` (true or false) and `solution` (a string). Each right solution forms a pair with each
  wrong solution of the same record.

`datasets.py` makes batches of these records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from rl_megatron import log
from rl_megatron.config.errors import nearest
from rl_megatron.data.conversations import is_conversation, read_preference, read_prompt
from rl_megatron.data.files import UNNAMED, split_heldout
from rl_megatron.data.plain_text import SIDES, PlainText
from rl_megatron.data.records import NothingLeft, Record

SINGLE_FILES = ("preferences.jsonl", "model_solutions.jsonl")  # if a directory has any, only the first one is read
LABEL = "label"  # the field that is true if an answer is desirable
_PAIR, _GRADED = "a pair", "graded solutions"  # the forms of a record


def split_by_prompt(
    records: Sequence[Record],
    heldout_fraction: float,
    prompt_template: str | None,
    wanted: int = 0,
    names: tuple[str, str] = UNNAMED,
) -> tuple[list[Record], list[Record]]:
    """Return the (training, held-out) pairs or single answers. All records of a prompt are in the same part.

    `heldout_fraction` of the prompts is held out, and more prompts until the held-out ones have `wanted` records. The
    choice depends on the records, but not on the run's seed. `split_heldout` describes `names`.
    """
    texts = PlainText(prompt_template)
    by_prompt: dict[str, list[Record]] = {}
    for record in records:
        by_prompt.setdefault(_identify_prompt(record, texts), []).append(record)
    train, heldout = split_heldout(list(by_prompt.values()), heldout_fraction, wanted, len, names)
    return [record for group in train for record in group], [record for group in heldout for record in group]


def _identify_prompt(record: Record, texts: PlainText) -> str:
    """Return a text that identifies the record's prompt: equal prompts have equal texts."""
    if not is_conversation(record):
        return texts.write_prompt(record)
    if SIDES[0] in record.values:
        chosen = read_preference(record)[0]
        messages = chosen.messages[: chosen.num_context]
    else:
        messages = read_prompt(record).messages
    return json.dumps(messages, sort_keys=True, default=str)


def build_pairs(records: Sequence[Record]) -> list[Record]:
    """Return the pairs of a file's records. The first record with an answer decides which form all must have.

    Records whose graded solutions are all right or all wrong are left out, and their number is logged. Raise
    NothingLeft if no record has an answer, or no question has both a right and a wrong solution.
    """
    first = next(filter(_find_form, records), records[0])
    form = _find_form(first)
    if form is None:
        raise NothingLeft(
            f"{first.location} has no preference, nor has any other record of data.path: its fields are "
            f"{sorted(first.values)}; a record needs 'chosen' and 'rejected', or graded solutions, mappings with "
            "'is_correct' and 'solution'."
        )
    for record in records:
        if _find_form(record) not in (form, None):
            raise ValueError(
                f"{record.location} has {_find_form(record)}, in a file that begins with {form} ({first.location}): "
                "use two files."
            )
    if form == _PAIR:
        for record in records:
            check_pair(record)
        return list(records)
    pairs = [list(_pair_solutions(record)) for record in records]
    num_left_out = pairs.count([])
    file = first.location.rpartition(":")[0]
    if num_left_out == len(pairs):
        raise NothingLeft(f"{file}: no question has both a right and a wrong solution, so there is no pair to learn.")
    if num_left_out:
        log.once(
            f"{file}: {num_left_out} of {len(pairs)} questions are left out, because they have no right or no wrong "
            "solution"
        )
    return [pair for question_pairs in pairs for pair in question_pairs]


def _find_form(record: Record) -> str | None:
    """Return the form of one record, or None if it has no answer in either form."""
    if any(side in record.values for side in SIDES):
        return _PAIR
    return _GRADED if any(map(_is_graded, record.values.values())) else None


def _is_graded(value: object) -> bool:
    return isinstance(value, Mapping) and "is_correct" in value


def check_pair(record: Record) -> None:
    """Check that a record has `chosen` and `rejected`, two different texts or lists of messages."""
    for side in SIDES:
        if side not in record.values:
            raise ValueError(f"{record.location}: the pair has no {side!r}{nearest(side, record.values)}")
        if isinstance(record.values[side], str) or not is_conversation(record):
            _check_text(record, side, record.values[side])
    if record.values["chosen"] == record.values["rejected"]:
        raise ValueError(
            f"{record.location}: 'chosen' and 'rejected' are equal, so neither can be preferred: remove the pair."
        )


def _check_text(record: Record, key: str, text: object) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{record.location}: {key!r} is a {type(text).__name__}; it must be a string.")
    if not text.strip():
        raise ValueError(f"{record.location}: {key!r} is empty: fill it in, or remove it.")


def _pair_solutions(record: Record) -> Iterator[Record]:
    """Yield all pairs of a right and a wrong solution, in the record's order; a repeated text is used once."""
    solutions = {key: value for key, value in record.values.items() if _is_graded(value)}
    grades: dict[str, bool] = {}
    for key, graded in solutions.items():
        if not isinstance(graded["is_correct"], bool) or "solution" not in graded:
            raise ValueError(
                f"{record.location}: {key!r} needs 'is_correct' (true or false) and 'solution' (a string)."
            )
        text = graded["solution"]
        _check_text(record, f"{key}.solution", text)
        if grades.setdefault(text, graded["is_correct"]) != graded["is_correct"]:
            raise ValueError(
                f"{record.location}: the text of {key!r} is graded both right and wrong: remove one of the two."
            )
    fields = {key: value for key, value in record.values.items() if key not in solutions}
    for chosen in (text for text, right in grades.items() if right):
        for rejected in (text for text, right in grades.items() if not right):
            yield Record({**fields, "chosen": chosen, "rejected": rejected}, record.location)


def check_labels(records: Sequence[Record]) -> None:
    """Check that every record has a label, which is true or false."""
    for record in records:
        if LABEL not in record.values:
            raise ValueError(
                f"{record.location}: the record has no {LABEL!r}, which is true for a desirable answer and false for "
                f"an undesirable one{nearest(LABEL, record.values)}; if another field has it, set "
                f"data.columns={{{LABEL}: …}}"
            )
        if not isinstance(record.values[LABEL], bool):
            raise ValueError(
                f"{record.location}: {LABEL!r} is {record.values[LABEL]!r}; it must be true (desirable) or false "
                "(undesirable)."
            )

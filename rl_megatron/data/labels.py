"""The labels of answers in records: desirable or undesirable."""

from __future__ import annotations

from collections.abc import Sequence

from rl_megatron.config.errors import nearest
from rl_megatron.data.records import Record

LABEL = "label"  # the field of a record


def check_labels(records: Sequence[Record]) -> None:
    """Check that every record has a label.

    Raises:
        ValueError: A record has none, or one that is neither true nor false; the message names file:line.
    """
    for record in records:
        if LABEL not in record.values:
            raise ValueError(
                f"{record.location}: the record has no {LABEL!r}, which is true for a desirable answer and false for "
                f"an undesirable one{nearest(LABEL, record.values)}; data.columns={{{LABEL}: …}} names another field"
            )
        if not isinstance(record.values[LABEL], bool):
            raise ValueError(
                f"{record.location}: {LABEL!r} is {record.values[LABEL]!r}; it must be true (desirable) or false "
                "(undesirable)."
            )

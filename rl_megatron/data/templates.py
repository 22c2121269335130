"""Templates: `str.format` strings over the fields of a record, checked before they are used."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

from rl_megatron.config.errors import unknown_name
from rl_megatron.data.records import Record

# The fields that are looked for, in this order, if no template is configured.
PROMPT_FIELDS = ("question", "prompt", "problem", "instruction", "query", "input")
ANSWER_FIELDS = ("answer", "completion", "response", "solution", "output")


def template_fields(template: str) -> list[str]:
    """Return the names of the fields that a template reads: `["question"]` for `"{question}: "`.

    Raises:
        ValueError: Braces do not match, or a field has no name.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}. Double a literal brace: {{{{ or }}}}.") from error
    fields = [name.partition(".")[0].partition("[")[0] for name in names]
    if "" in fields or any(field.isdigit() for field in fields):
        raise ValueError(f"template {template!r}: every field needs a name, as in {{question}}.")
    return fields


def require_fields(records: Sequence[Record], template: str, key: str = "template") -> None:
    """Check that every record has all fields of `template`.

    Args:
        records: The records.
        template: The template.
        key: The key that has the template, for the message.

    Raises:
        ValueError: A field is missing; the message names file:line, the field and the nearest one.
    """
    fields = template_fields(template)
    for record in records:
        for field in fields:
            if field not in record.values:
                problem = unknown_name("field", field, record.values)
                raise ValueError(
                    f"{record.location}: {key} {template!r} needs a field that the record does not have: {problem}"
                )


def first_field(record: Record, candidates: Iterable[str], key: str) -> str:
    """Return the first of the candidates that is a field of the record.

    Args:
        record: The record.
        candidates: Names of fields.
        key: The key that names the field instead, for the message.

    Raises:
        ValueError: The record has none of them.
    """
    for field in candidates:
        if field in record.values:
            return field
    raise ValueError(
        f"{record.location}: the record has none of {', '.join(candidates)} (its fields: "
        f"{', '.join(record.values) or 'none'}): set {key}, for example to '{{{next(iter(record.values), 'text')}}}'."
    )

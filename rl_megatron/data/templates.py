"""Templates: `str.format` strings over the fields of a record, checked before they are used."""

from __future__ import annotations

import string
from collections.abc import Sequence

from rl_megatron.config.errors import unknown_name
from rl_megatron.data.records import Record


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


def require_fields(records: Sequence[Record], template: str) -> None:
    """Check that every record has all fields of `template`.

    Raises:
        ValueError: A field is missing; the message names file:line, the field and the nearest one.
    """
    fields = template_fields(template)
    for record in records:
        for field in fields:
            if field not in record.values:
                problem = unknown_name("field", field, record.values)
                raise ValueError(
                    f"{record.location}: template {template!r} needs a field that the record does not have: {problem}"
                )

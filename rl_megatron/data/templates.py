"""Templates: `str.format` strings over the fields of a record, checked before any row is made."""

from __future__ import annotations

import string
from collections.abc import Sequence

from rl_megatron.config.errors import unknown_name
from rl_megatron.data.files import Record


def template_fields(template: str) -> list[str]:
    """The names a template reads: `"{question}\\n"` → `["question"]`.

    Raises:
        ValueError: braces that do not match, or a field without a name.
    """
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}. Write a literal brace twice: {{{{ or }}}}.") from error
    fields = [name.partition(".")[0].partition("[")[0] for name in names]
    if "" in fields or any(field.isdigit() for field in fields):
        raise ValueError(f"template {template!r}: every field needs a name, as in {{question}}.")
    return fields


def require_fields(records: Sequence[Record], template: str) -> None:
    """ValueError naming file:line, the missing field and its nearest, unless every record can fill `template`."""
    fields = template_fields(template)
    for record in records:
        for field in fields:
            if field not in record.values:
                problem = unknown_name("field", field, record.values)
                raise ValueError(f"{record.location}: template {template!r} needs a field the record lacks: {problem}")

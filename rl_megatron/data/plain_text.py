"""`PlainText` writes prompts and answers from the fields of records, with the templates of a data section."""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl_megatron import log
from rl_megatron.config.errors import ConfigError, unknown_name
from rl_megatron.config.schema import DataConfig
from rl_megatron.data.conversations import is_conversation
from rl_megatron.data.records import Record
from rl_megatron.data.tasks.task import TaskRecord

# If no template is configured, the first of these fields that a record has is used.
PROMPT_FIELDS = ("question", "prompt", "problem", "instruction", "query", "input")
ANSWER_FIELDS = ("answer", "completion", "response", "solution", "output")


def list_fields(template: str) -> list[str]:
    """Return the names of the fields that a template reads: `["question"]` for `"{question}: "`."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"template {template!r}: {error}. Double a literal brace: {{{{ or }}}}.") from error
    fields = [name.partition(".")[0].partition("[")[0] for name in names]
    if "" in fields or any(field.isdigit() for field in fields):
        raise ValueError(f"template {template!r}: every field needs a name, as in {{question}}.")
    return fields


def require_fields(records: Sequence[Record], template: str, key: str = "template") -> None:
    """Check that every record has all fields of `template`. Messages name the `key` that has the template."""
    fields = list_fields(template)
    for record in records:
        for field in fields:
            if field not in record.values:
                problem = unknown_name("field", field, record.values)
                raise ValueError(
                    f"{record.location}: {key} {template!r} needs a field that the record does not have: {problem}"
                )


def find_field(record: Record, candidates: Iterable[str], key: str) -> str:
    """Return the first candidate that is a field of the record; `key` is the setting to change if there is none."""
    for field in candidates:
        if field in record.values:
            return field
    raise ValueError(
        f"{record.location}: the record has none of {', '.join(candidates)} (its fields: "
        f"{', '.join(record.values) or 'none'}): set {key}, for example to '{{{next(iter(record.values), 'text')}}}'."
    )


SIDES = ("chosen", "rejected")
_WHOLE = "{text}"  # the template of a task's own prompt or answer
Parts = tuple[str, Mapping[str, Any]]


class PlainText:
    """The templates of a data section. If a template is null, a task's own text or a field of the record is used."""

    def __init__(self, prompt_template: str | None = None, answer_template: str | None = None):
        self._prompt_template, self._answer_template = prompt_template, answer_template
        self._inferred: dict[str, str] = {}  # templates that follow from the first record's fields
        for template in (prompt_template, answer_template):
            if template is not None:
                list_fields(template)

    def write_prompt(self, record: Record, of_message: bool = False) -> str:
        """Return the text of the record's prompt.

        If no template is configured, a line break follows the field of the prompt, unless that is `prompt`, so that the
        answer is on a line of its own. The content of a chat message (`of_message`) does not end with that line break.
        """
        template, values = self.prompt_parts(record)
        text = template.format_map(values)
        return text.removesuffix("\n") if of_message and self._prompt_template is None else text

    def write_answer(self, record: Record) -> str:
        """Return the text of the record's answer."""
        template, values = self.answer_parts(record)
        return template.format_map(values)

    def prompt_parts(self, record: Record) -> Parts:
        """Return the template of the prompt, and the values that fill it."""
        if self._prompt_template is None and isinstance(record, TaskRecord):
            return _WHOLE, {"text": record.prompt}
        return self._find_parts("prompt_template", self._prompt_template, PROMPT_FIELDS, record)

    def answer_parts(self, record: Record) -> Parts:
        """Return the template of the answer, and the values that fill it."""
        if self._answer_template is None and isinstance(record, TaskRecord):
            return _WHOLE, {"text": record.answer}
        return self._find_parts("answer_template", self._answer_template, ANSWER_FIELDS, record)

    def split_sides(self, record: Record) -> tuple[Record, Record]:
        """Return the record twice, with the chosen and with the rejected text as its `answer`."""
        template = self._answer_template
        if template is not None and "answer" not in list_fields(template):
            raise ValueError(
                f"data.answer_template={template!r} has no {{answer}}, the place of the chosen or the rejected text: "
                "add it."
            )
        chosen, rejected = (Record({**record.values, "answer": record.values[side]}, record.location) for side in SIDES)
        return chosen, rejected

    def _find_parts(self, key: str, template: str | None, candidates: Sequence[str], record: Record) -> Parts:
        """Return `data.<key>`, or the template that the first record's fields imply, and the values that fill it."""
        if template is None:
            template = self._infer_template(key, candidates, record)
        require_fields([record], template, f"data.{key}")
        return template, record.values

    def _infer_template(self, key: str, candidates: Sequence[str], record: Record) -> str:
        """Return the template that the fields of the first record imply, and log it unless it is "{answer}"."""
        if key not in self._inferred:
            field = find_field(record, candidates, f"data.{key}")
            ends_line = key == "prompt_template" and field != "prompt"
            self._inferred[key] = f"{{{field}}}\n" if ends_line else f"{{{field}}}"
            if self._inferred[key] != "{answer}":
                log.once(f"data.{key} is {self._inferred[key]!r}, because the records have the field {field!r}")
        return self._inferred[key]


def write_texts(records: Iterable[Record], data: DataConfig, pairs: bool = False) -> Iterator[str]:
    """Yield the prompts and answers of records, or of preference pairs, as texts to train a tokenizer on."""
    texts = PlainText(data.prompt_template, data.answer_template)
    for record in records:
        refuse_conversation(record, data)
        prompt = texts.write_prompt(record)
        if pairs:
            yield from (prompt, *(texts.write_answer(side) for side in texts.split_sides(record)))
        else:
            yield prompt + texts.write_answer(record)


def refuse_conversation(record: Record, data: DataConfig) -> None:
    """Refuse to train a tokenizer on records that become conversations: it would have no chat template."""
    if data.format == "chat" or (data.format == "auto" and is_conversation(record)):
        raise ConfigError(
            f"data.format={data.format}: {record.location} becomes a conversation, and a tokenizer that is trained on "
            "the data has no chat template; set tokenizer.path to the tokenizer of a chat model"
        )

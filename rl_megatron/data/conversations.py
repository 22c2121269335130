"""Read conversations from records: lists of messages, with the tools that the assistant may call.

A record is a conversation if its field `messages`, `prompt`, `completion`, `chosen` or `rejected` is a list of
messages. A message is what Hugging Face chat templates take: a mapping with `role`, `content` and optionally
`tool_calls`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from rl_megatron.config.errors import nearest
from rl_megatron.data.records import Record

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = ("messages", "prompt", "completion", "chosen", "rejected")


@dataclass(frozen=True)
class Conversation:
    """A list of messages, which may begin with context that is not learned.

    Attributes:
        tools: JSON schemas of the tools that the assistant may call, or None.
        num_context: The number of messages at the beginning that are not learned, even if they are the assistant's.
    """

    messages: list[dict[str, Any]]
    record: Record
    tools: list[dict[str, Any]] | None = None
    num_context: int = 0


def is_conversation(record: Record) -> bool:
    """Return whether a field of the record, such as `messages` or `prompt`, is a list of messages."""
    return any(_is_list(record.values.get(field)) for field in _FIELDS)


def read_conversation(record: Record) -> Conversation:
    """Return the conversation of a record for SFT: `messages`, or `prompt` followed by `completion`."""
    values = record.values
    if _is_list(values.get("messages")):
        return Conversation(_read_messages(record, "messages"), record, _read_tools(record))
    if "prompt" in values and "completion" in values:
        return _append_answer(record, _read_messages(record, "prompt"), "completion")
    if "chosen" in values:
        return read_preference(record)[0]
    raise _missing_fields(record, "'messages', or 'prompt' and 'completion'")


def read_prompt(record: Record) -> Conversation:
    """Return the conversation up to its last user or tool message, which the assistant is to answer."""
    values = record.values
    if _is_list(values.get("messages")):
        messages, field = _read_messages(record, "messages"), "messages"
    elif _is_list(values.get("prompt")):
        messages, field = _read_messages(record, "prompt"), "prompt"
    elif "chosen" in values:
        pair = read_preference(record)[0]
        messages, field = pair.messages[: pair.num_context], "chosen"
    else:
        raise _missing_fields(record, "'messages' or 'prompt'")
    to_answer = [number for number, message in enumerate(messages) if message["role"] in ("user", "tool")]
    if not to_answer:
        raise ValueError(f"{record.location}: {field!r} has no user or tool message to answer: add one.")
    return Conversation(messages[: to_answer[-1] + 1], record, _read_tools(record))


def find_last_answer(record: Record) -> str | None:
    """Return the text of the last message in `messages` if it is the assistant's, otherwise None."""
    messages = record.values.get("messages")
    last = messages[-1] if _is_list(messages) and messages else None
    return get_message_text(last) if isinstance(last, Mapping) and last.get("role") == "assistant" else None


def get_message_text(message: Message) -> str:
    """Return the text of a message, without parts that are not text."""
    content = message.get("content")
    if _is_list(content):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else str(content)


def read_preference(record: Record) -> tuple[Conversation, Conversation]:
    """Return the conversations with the chosen and with the rejected answer.

    The context of both is `prompt` or, if that is not a list of messages, `messages`. If neither is one, it is the
    messages with which both `chosen` and `rejected` begin.
    """
    values = record.values
    context = next((field for field in ("prompt", "messages") if _is_list(values.get(field))), None)
    if context is not None:
        messages = _read_messages(record, context)
        chosen, rejected = (_append_answer(record, messages, side) for side in ("chosen", "rejected"))
        return chosen, rejected
    sides = [_read_messages(record, side) for side in ("chosen", "rejected")]
    num_shared = next((n for n, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
    if num_shared == 0:
        raise ValueError(
            f"{record.location}: 'chosen' and 'rejected' do not begin with the same message, so they do not answer the "
            "same prompt: begin both with the prompt's messages, or put those in 'prompt'."
        )
    tools = _read_tools(record)
    chosen, rejected = (Conversation(side, record, tools, num_shared) for side in sides)
    return chosen, rejected


def _append_answer(record: Record, context: list[dict[str, Any]], field: str) -> Conversation:
    """Return the context and the answer in `field`: a string, or messages that may repeat the context first."""
    answer = record.values.get(field)
    if isinstance(answer, str):
        messages = [{"role": "assistant", "content": answer}]
    else:
        messages = _read_messages(record, field)
    if messages[: len(context)] == context:
        messages = messages[len(context) :]
    return Conversation([*context, *messages], record, _read_tools(record), len(context))


def _read_messages(record: Record, field: str) -> list[dict[str, object]]:
    """Return the messages in a field, each without keys whose value is null."""
    messages = record.values.get(field)
    where = f"{record.location}: {field!r}"
    if field not in record.values:
        raise ValueError(f"{where} is missing{nearest(field, record.values)}")
    if not _is_list(messages) or not messages:
        raise ValueError(f"{where} must be a list of messages with 'role' and 'content', but is {_show(messages)}.")
    return [_read_message(message, f"{where}, message {number}") for number, message in enumerate(messages, start=1)]


def _read_message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} is {_show(message)}; it must be a mapping with 'role' and 'content'.")
    role = message.get("role")
    if role is None:
        hint = "; rename 'from' to 'role' and 'value' to 'content'" if "from" in message else ""
        raise ValueError(f"{where} has no 'role' (its keys: {', '.join(map(str, message))}){hint}.")
    if role not in ROLES:
        raise ValueError(f"{where} has the unknown role {role!r}{nearest(str(role), ROLES)}")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None and not (role == "assistant" and calls):
        raise ValueError(f"{where} ({role}) has no 'content': add it, or remove the message.")
    if not isinstance(content, str | None) and not _is_parts(content):
        raise ValueError(
            f"{where} ({role}): 'content' is {_show(content)}; it must be a string, or a list of mappings with 'type'."
        )
    if calls is not None:
        _check_calls(calls, f"{where} ({role})")
    return {key: value for key, value in message.items() if value is not None}


def _check_calls(calls: object, where: str) -> None:
    if not _is_list(calls):
        raise ValueError(f"{where}: 'tool_calls' is {_show(calls)}; it must be a list.")
    for number, call in enumerate(calls, start=1):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"{where}: call {number} of 'tool_calls' is {_show(call)}; it must be a mapping with 'function', "
                "which has 'name' and 'arguments'."
            )
        if not isinstance(function.get("arguments", {}), Mapping | str):
            raise ValueError(f"{where}: 'arguments' of call {number} must be a mapping, or a mapping as a JSON string.")


def _read_tools(record: Record) -> list[dict[str, object]] | None:
    """Return the tools in `tools`, which is a list or the JSON of a list, or None if the record has none."""
    tools: object = record.values.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"{record.location}: 'tools' is a string that is not JSON ({error.msg}).") from error
    if not tools:
        return None
    if not _is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"{record.location}: 'tools' is {_show(tools)}; it must be a list of JSON schemas.")
    return [{**tool} for tool in tools]


def _missing_fields(record: Record, needed: str) -> ValueError:
    return ValueError(
        f"{record.location}: the record is a conversation without {needed}: it has {sorted(record.values)}."
    )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_parts(content: object) -> bool:
    return _is_list(content) and all(isinstance(part, Mapping) and "type" in part for part in content)


def _show(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}…" if len(text) > 60 else text

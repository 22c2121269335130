"""Turns with calls of tools in a chat template: their text stays as the policy wrote it.

Most templates write the text of such a turn as it is, and the answers of the tools after it. Some refuse answers after
a plain text, because they expect the calls as a list. For these, a placeholder list of calls is rendered, and then
replaced by the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.chat_template import ChatTemplate
from rl_megatron.data.conversations import Conversation
from rl_megatron.data.records import Record

_MARK = "CALL-5c1e07-"  # begins the name of the first call of a stand-in
_TEXTS = ("FIRST-5c1e07", "SECOND-5c1e07")
_ANSWERS = ("ANSWER-5c1e07", "REPLY-5c1e07")


@dataclass(frozen=True)
class _StandIn:
    """The text that a template writes around a list of calls.

    Attributes:
        beginning: The text from the beginning of the turn to the name of the first call.
        end: The text that ends a turn, after the turn's last character.
    """

    beginning: str
    end: str


class ToolTurns:
    """A chat template that writes turns with calls as the policy wrote them."""

    def __init__(self, template: ChatTemplate):
        """Keep the template, which is examined at the first answer of a tool."""
        self._template = template
        self._stand_in: _StandIn | None = None
        self._is_known = False

    def prompt(self, conversation: Conversation) -> str:
        """Return the text that the assistant's next turn follows.

        Raise ConfigError if the template accepts no answers of tools, and ValueError if it fails.
        """
        indices = _find_turns_with_calls(conversation.messages)
        if indices and not self._is_known:
            self._stand_in, self._is_known = _find_stand_in(self._template, conversation.tools or ()), True
        if not indices or self._stand_in is None:
            return self._template.prompt(conversation)
        messages = list(conversation.messages)
        for index in indices:
            messages[index] = _write_calls(messages, index)
        rendered = self._template.prompt(replace(conversation, messages=messages))
        end = 0
        for index in indices:
            text = str(conversation.messages[index]["content"])
            rendered, end = _restore_text(rendered, end, f"{_MARK}{index}-", self._stand_in, text)
        return rendered


def check_tool_turns(template: ChatTemplate, schemas: Sequence[Mapping[str, object]]) -> None:
    """Check that a chat template can write turns with calls of these tools, and the tools' answers."""
    _find_stand_in(template, schemas)


def _find_turns_with_calls(messages: Sequence[Mapping[str, object]]) -> list[int]:
    """Return the indices of turns that tools answer, except turns of the record, which have a list of calls."""
    return [
        index
        for index, (message, following) in enumerate(zip(messages, messages[1:], strict=False))
        if message["role"] == "assistant" and following["role"] == "tool" and not message.get("tool_calls")
        and "tool_call_id" in following
    ]  # fmt: skip


def _write_calls(messages: Sequence[Mapping[str, object]], index: int) -> dict[str, object]:
    """Return the turn `index` as a list of calls, one for each answer that follows it."""
    calls = []
    for answer in messages[index + 1 :]:
        if answer["role"] != "tool":
            break
        name = str(answer.get("name", "")) if calls else f"{_MARK}{index}-"
        function = {"name": name, "arguments": {}}
        calls.append({"type": "function", "id": answer.get("tool_call_id", ""), "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _restore_text(rendered: str, begin: int, mark: str, stand_in: _StandIn, text: str) -> tuple[str, int]:
    """Return the rendered text with the turn's text instead of a stand-in, and the index where the turn's text ends."""
    name = rendered.find(mark, begin)
    end = rendered.find(stand_in.end, name)
    if name < 0 or end < 0 or not rendered.endswith(stand_in.beginning, begin, name):
        raise ValueError(
            "the chat template writes tool calls in different ways within one conversation, so the beginning and the "
            "end of a turn cannot be found: set data.chat_template to a template that leaves the content of turns "
            "with tool calls unchanged"
        )
    start = name - len(stand_in.beginning)
    return rendered[:start] + text + rendered[end:], start + len(text)


def _find_stand_in(template: ChatTemplate, tools: Sequence[Mapping[str, object]]) -> _StandIn | None:
    """Return how a template writes a list of calls, or None if it accepts answers after a plain text."""
    first, second = (
        {"role": "tool", "tool_call_id": f"call{number:05d}", "name": "tool", "content": text}
        for number, text in enumerate(_ANSWERS, 1)
    )
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": _TEXTS[0]},
        first,
        {"role": "assistant", "content": _TEXTS[1]},
        second,
    ]
    record = Record({}, "rollout.tools")
    conversation = Conversation(messages, record, [dict(tool) for tool in tools] or None)
    refused = _find_refusal(template, conversation, (*_TEXTS, *_ANSWERS))
    if refused is None:
        return None
    marked = [messages[0], _write_calls(messages, 1), first, _write_calls(messages, 3), second]
    mark = f"{_MARK}1-"
    refused_list = _find_refusal(template, replace(conversation, messages=marked), (mark, f"{_MARK}3-", *_ANSWERS))
    if refused_list is not None:
        raise ConfigError(
            "rollout.tools.functions: the chat template cannot render messages of tools after a turn's text "
            f"({refused}), nor after a list of tool calls ({refused_list}); set data.chat_template to one that can"
        )
    beginning = template.prompt(replace(conversation, messages=messages[:1]))
    turn = template.text(replace(conversation, messages=marked[:2]))
    if not turn.startswith(beginning):
        raise ConfigError(
            "rollout.tools.functions: the chat template cannot render messages of tools after a turn's text, and "
            "renders earlier messages differently once a turn follows them; set data.chat_template to another one"
        )
    turn = turn[len(beginning) :]
    plain = template.text(replace(conversation, messages=messages[:2]))
    return _StandIn(turn.partition(mark)[0], plain.partition(_TEXTS[0])[2])


def _find_refusal(template: ChatTemplate, conversation: Conversation, wanted: Sequence[str]) -> str | None:
    """Return why a template cannot write a conversation, or None if it writes each of the `wanted` texts once."""
    try:
        text = template.prompt(conversation)
    except ValueError as error:
        return str(error)
    missing = [part for part in wanted if text.count(part) != 1]
    return f"it leaves {missing[0]!r} out, or writes it more than once" if missing else None

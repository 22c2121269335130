"""Turns with calls of tools in a chat template: their text stays as the policy wrote it.

Most templates write the text of such a turn as it is, and the answers of the tools behind it. Some refuse answers
behind a plain text: they want the calls as a list. For these a stand-in of the calls is rendered, and replaced by the
text.
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
    """How a template writes a list of calls.

    Attributes:
        before: What it writes from the beginning of the turn to the name of the first call.
        behind: What it writes behind a turn, from its last character on: the end of the turn.
    """

    before: str
    behind: str


class ToolTurns:
    """A chat template, which writes turns with calls as the policy wrote them."""

    def __init__(self, template: ChatTemplate):
        """Keep the template; it is asked about calls when there is the first answer of a tool."""
        self._template = template
        self._stand_in: _StandIn | None = None
        self._is_known = False

    def prompt(self, conversation: Conversation) -> str:
        """Return the text that the assistant's next turn follows.

        Raises:
            ConfigError: The template takes no answers of tools.
            ValueError: The template fails.
        """
        places = _turns_with_calls(conversation.messages)
        if places and not self._is_known:
            self._stand_in, self._is_known = _stand_in(self._template, conversation.tools or ()), True
        if not places or self._stand_in is None:
            return self._template.prompt(conversation)
        messages = list(conversation.messages)
        for place in places:
            messages[place] = _with_calls(messages, place)
        rendered = self._template.prompt(replace(conversation, messages=messages))
        behind = 0
        for place in places:
            text = str(conversation.messages[place]["content"])
            rendered, behind = _put_back(rendered, behind, f"{_MARK}{place}-", self._stand_in, text)
        return rendered


def check_tool_turns(template: ChatTemplate, schemas: Sequence[Mapping[str, Any]]) -> None:
    """Check that a chat template can write turns with calls and their answers.

    Args:
        template: The chat template.
        schemas: The JSON schemas of the tools.

    Raises:
        ConfigError: It cannot.
    """
    _stand_in(template, schemas)


def _turns_with_calls(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the places of the turns that tools answer. Those that come with a list of calls are the record's."""
    return [
        place
        for place, (message, following) in enumerate(zip(messages, messages[1:], strict=False))
        if message["role"] == "assistant" and following["role"] == "tool" and not message.get("tool_calls")
        and "tool_call_id" in following
    ]  # fmt: skip


def _with_calls(messages: Sequence[Mapping[str, Any]], place: int) -> dict[str, Any]:
    """Return a turn with a list of calls, which has one call for each answer."""
    calls = []
    for answer in messages[place + 1 :]:
        if answer["role"] != "tool":
            break
        name = str(answer.get("name", "")) if calls else f"{_MARK}{place}-"
        function = {"name": name, "arguments": {}}
        calls.append({"type": "function", "id": answer.get("tool_call_id", ""), "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _put_back(rendered: str, begin: int, mark: str, stand_in: _StandIn, text: str) -> tuple[str, int]:
    """Return a rendered text in which a stand-in is replaced by the text of the turn, and where that ends.

    Raises:
        ValueError: The template writes the stand-in in another way than it did before.
    """
    found = rendered.find(mark, begin)
    end = rendered.find(stand_in.behind, found)
    if found < 0 or end < 0 or not rendered.endswith(stand_in.before, begin, found):
        raise ValueError(
            "the chat template writes calls of tools in different ways within one conversation, so it cannot be told "
            "where a turn begins and ends: set data.chat_template to a template that writes the content of turns with "
            "calls as it is"
        )
    start = found - len(stand_in.before)
    return rendered[:start] + text + rendered[end:], start + len(text)


def _stand_in(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> _StandIn | None:
    """Return how a template writes a list of calls, or None if it takes answers behind a plain text.

    Raises:
        ConfigError: It takes answers of tools in neither way.
    """
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
    refused = _refusal(template, conversation, (*_TEXTS, *_ANSWERS))
    if refused is None:
        return None
    marked = [messages[0], _with_calls(messages, 1), first, _with_calls(messages, 3), second]
    mark = f"{_MARK}1-"
    refused_list = _refusal(template, replace(conversation, messages=marked), (mark, f"{_MARK}3-", *_ANSWERS))
    if refused_list is not None:
        raise ConfigError(
            f"rollout.tools.functions: the chat template takes no answers of tools, neither behind a turn's text "
            f"({refused}) nor behind a list of calls ({refused_list}); set data.chat_template to one that does"
        )
    beginning = template.prompt(replace(conversation, messages=messages[:1]))
    turn = template.text(replace(conversation, messages=marked[:2]))
    if not turn.startswith(beginning):
        raise ConfigError(
            "rollout.tools.functions: the chat template takes no answers of tools behind a turn's text, and writes "
            "what is before a turn in another way once it is there; set data.chat_template to another one"
        )
    turn = turn[len(beginning) :]
    plain = template.text(replace(conversation, messages=messages[:2]))
    return _StandIn(turn.partition(mark)[0], plain.partition(_TEXTS[0])[2])


def _refusal(template: ChatTemplate, conversation: Conversation, wanted: Sequence[str]) -> str | None:
    """Return why a template cannot write a conversation, or None if each of the texts is there once."""
    try:
        text = template.prompt(conversation)
    except ValueError as error:
        return str(error)
    missing = [each for each in wanted if text.count(each) != 1]
    return f"it leaves {missing[0]!r} out, or writes it more than once" if missing else None

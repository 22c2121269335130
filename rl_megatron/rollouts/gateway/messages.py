"""Messages of requests: what the chat template gets of them, and when two of them are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_megatron.data.conversations import ROLES
from rl_megatron.rollouts.gateway.bodies import BodyLimits, check_value, read_json, write_json
from rl_megatron.rollouts.gateway.errors import RequestRefused
from rl_megatron.rollouts.limits import HistoryFull

_LIMITS_OF_ARGUMENTS = BodyLimits(10_000, 1 << 30)  # those of the policy's calls and of the agent's alike
# What makes a message: its role, its text, its tool calls, and the call and the name that it answers for.
Key = tuple[str, str, tuple[tuple[str, str, str], ...], str, str]


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages of a request, as a chat template takes them.

    Parts of text are joined, the arguments of tool calls become mappings, and keys with the value null are left out.

    Raises:
        RequestRefused: They are malformed, or have parts that are not text.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages must be a list with at least one message", param="messages")
    return [_checked(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _checked(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestRefused(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestRefused(f"{where}.role={role!r} must be one of {', '.join(ROLES)}", param=f"{where}.role")
    found: dict[str, Any] = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            found[name] = _string(message[name], f"{where}.{name}")
    if message.get("tool_calls"):
        found["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return found


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestRefused(f"{where} must be a string or a list of parts", param=where)
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise RequestRefused(
                f"{where}[{number}] is {kind!r}; the policy reads only parts of text", param=f"{where}[{number}]"
            )
    return "".join(part["text"] for part in content)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestRefused(f"{where} must be a list", param=where)
    found = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestRefused(f"{where}[{number}] must have a function", param=f"{where}[{number}]")
        name = _string(function.get("name"), f"{where}[{number}].function.name")
        arguments = function.get("arguments", {})
        if not isinstance(arguments, Mapping):
            arguments = _parsed(_string(arguments, f"{where}[{number}].function.arguments"))
        call_id = _string(call.get("id") or "", f"{where}[{number}].id")
        found.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return found


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestRefused(f"{where} must be a string", param=where)
    return value


def _parsed(arguments: str) -> Any:
    """Return the mapping that a JSON text has, which templates write themselves; another text stays as it is.

    So does one that is nested too deep, is too large, or has half of a surrogate pair, which no tokenizer takes.
    """
    try:
        found = read_json(arguments, _LIMITS_OF_ARGUMENTS.values)
        check_value(found, "arguments", _LIMITS_OF_ARGUMENTS)
    except (ValueError, RecursionError, RequestRefused, HistoryFull):
        return arguments
    return found if isinstance(found, dict) else arguments


def key_of(message: Mapping[str, Any]) -> Key:
    """Return what a message of `checked_messages` is compared by."""
    return (
        message["role"],
        message["content"],
        _call_keys(message.get("tool_calls", ())),
        message.get("tool_call_id", ""),
        message.get("name", ""),
    )


def _call_keys(calls: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str, str], ...]:
    found = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        written = arguments if isinstance(arguments, str) else write_json(arguments)
        found.append((call["id"], call["function"]["name"], written))
    return tuple(found)


@dataclass(frozen=True)
class Answered:
    """What the gateway answered for a turn, and so what an agent may send back as the policy's message.

    Attributes:
        content: The text that was answered; None with tool calls.
        text: The text of the completion, in which tool calls are as the policy wrote them.
        calls: The tool calls that were answered.
    """

    content: str | None
    text: str
    calls: Sequence[Mapping[str, Any]]

    def is_meant_by(self, key: Key) -> bool:
        """Return whether a message is this answer, perhaps without white space around it or without ids of calls."""
        role, content, calls, _, _ = key
        if role != "assistant":
            return False
        said = content.strip()
        if not calls:
            return said == self.text.strip() or (self.content is not None and said == self.content.strip())
        mine = _call_keys(self.calls)
        return (
            len(calls) == len(mine)
            and all(one[1:] == other[1:] and one[0] in ("", other[0]) for one, other in zip(calls, mine, strict=True))
            and said in ("", self.text.strip())
        )

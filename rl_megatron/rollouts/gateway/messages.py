"""Messages of requests: their form for a chat template, and the keys by which they are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_megatron.data.conversations import ROLES
from rl_megatron.rollouts.gateway.bodies import BodyLimits, RequestRefused, check_value, read_json, write_json
from rl_megatron.rollouts.trajectory import HistoryFull

_LIMITS_OF_ARGUMENTS = BodyLimits(10_000, 1 << 30)  # for tool calls, both the policy's and the agent's
# What messages are compared by: role, text, tool calls (id, name, arguments), `tool_call_id` and `name`.
Key = tuple[str, str, tuple[tuple[str, str, str], ...], str, str]


def read_messages(messages: object) -> list[dict[str, object]]:
    """Return the messages of a request in the form that chat templates take.

    Text parts are joined, the arguments of tool calls become mappings, and keys with the value null are left out.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestRefused("messages must be a list with at least one message", param="messages")
    return [_read_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _read_message(message: object, where: str) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise RequestRefused(f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise RequestRefused(f"{where}.role={role!r} must be one of {', '.join(ROLES)}", param=f"{where}.role")
    result: dict[str, object] = {"role": role, "content": _read_text(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            result[name] = _read_string(message[name], f"{where}.{name}")
    if message.get("tool_calls"):
        result["tool_calls"] = _read_calls(message["tool_calls"], f"{where}.tool_calls")
    return result


def _read_text(content: object, where: str) -> str:
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


def _read_calls(calls: object, where: str) -> list[dict[str, object]]:
    if not isinstance(calls, list):
        raise RequestRefused(f"{where} must be a list", param=where)
    result = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestRefused(f"{where}[{number}] must have a function", param=f"{where}[{number}]")
        name = _read_string(function.get("name"), f"{where}[{number}].function.name")
        arguments = function.get("arguments", {})
        if not isinstance(arguments, Mapping):
            arguments = _parse_arguments(_read_string(arguments, f"{where}[{number}].function.arguments"))
        call_id = _read_string(call.get("id") or "", f"{where}[{number}].id")
        result.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return result


def _read_string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise RequestRefused(f"{where} must be a string", param=where)
    return value


def _parse_arguments(arguments: str) -> object:
    """Parse arguments that are a JSON object, because chat templates write the JSON; return other texts unchanged.

    Texts that are nested too deeply, too large, or not Unicode are also returned unchanged.
    """
    try:
        value = read_json(arguments, _LIMITS_OF_ARGUMENTS.values)
        check_value(value, "arguments", _LIMITS_OF_ARGUMENTS)
    except (ValueError, RecursionError, RequestRefused, HistoryFull):
        return arguments
    return value if isinstance(value, dict) else arguments


def build_key(message: Mapping[str, Any]) -> Key:
    """Return the key by which a message from `read_messages` is compared."""
    return (
        message["role"],
        message["content"],
        _build_call_keys(message.get("tool_calls", ())),
        message.get("tool_call_id", ""),
        message.get("name", ""),
    )


def _build_call_keys(calls: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str, str], ...]:
    keys = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = _parse_arguments(arguments)
        written = arguments if isinstance(arguments, str) else write_json(arguments)
        keys.append((call["id"], call["function"]["name"], written))
    return tuple(keys)


@dataclass(frozen=True)
class Answered:
    """The gateway's answer to a request, which the agent may send back later as the policy's message.

    Attributes:
        content: The text of the answer; None if the answer has tool calls.
        text: The text of the completion, in which tool calls are as the policy wrote them.
        calls: The tool calls of the answer.
    """

    content: str | None
    text: str
    calls: Sequence[Mapping[str, object]]

    def is_meant_by(self, key: Key) -> bool:
        """Return whether a message is this answer; white space around it and missing ids of calls do not matter."""
        role, content, calls, _, _ = key
        if role != "assistant":
            return False
        text = content.strip()
        if not calls:
            return text == self.text.strip() or (self.content is not None and text == self.content.strip())
        answered = _build_call_keys(self.calls)
        return (
            len(calls) == len(answered)
            and all(
                one[1:] == other[1:] and one[0] in ("", other[0]) for one, other in zip(calls, answered, strict=True)
            )
            and text in ("", self.text.strip())
        )

"""Find tool calls in the text of a completion, and convert them to the format of OpenAI's API."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron import log
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.loading.import_strings import is_import_string, load_object
from rl_megatron.data.chat_template import ChatTemplate
from rl_megatron.rollouts.tools.calls import MalformedCall, Parser, drop_thinking
from rl_megatron.rollouts.tools.formats import PARSERS, detect_format

AUTO = "auto"  # this value of rollout.agent.tool_format detects the format from the chat template
_KEY = "rollout.agent.tool_format"


def check_tool_format(name: str | None) -> None:
    """Check that `rollout.agent.tool_format` names a format, or a function that can be loaded."""
    if name is None or name == AUTO or name in PARSERS:
        return
    if not is_import_string(name):
        raise ConfigError(f"{_KEY}={name}: there is no such format{nearest(name, [AUTO, *PARSERS])}")
    load_object(name, _KEY)


def choose_parser(name: str | None, template: ChatTemplate | None) -> Parser | None:
    """Return the parser that `rollout.agent.tool_format` names; None if agents get tool calls as text.

    For "auto", the chat template determines the format.
    """
    if name is None:
        return None
    if name != AUTO:
        return PARSERS[name] if name in PARSERS else load_object(name, _KEY)
    if template is None:
        return None
    try:
        return PARSERS[detect_format(template.text_with_tools, _KEY)]
    except ConfigError as error:
        log.once(f"agents get tool calls as text: {error}")
        return None


def find_tool_calls(parser: Parser | None, text: str, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Return a turn's tool calls in the format of OpenAI's API; none if one of them cannot be read.

    `tools` are the JSON schemas of the tools that the turn may call.
    """
    if parser is None:
        return []
    functions = [tool.get("function", tool) for tool in tools]
    parameters = {str(function["name"]): function.get("parameters", {}) for function in functions if "name" in function}
    calls = parser(drop_thinking(text), parameters)
    if any(isinstance(call, MalformedCall) for call in calls):
        return []  # the agent gets the text, which is more helpful than an error
    return [
        {
            "id": call.id or f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
        if not isinstance(call, MalformedCall)
    ]

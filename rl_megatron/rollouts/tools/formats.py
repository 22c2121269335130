"""The formats in which models write calls of tools, and the choice of one from the text of a chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rl_megatron.config.errors import ConfigError
from rl_megatron.rollouts.tools.calls import Parser
from rl_megatron.rollouts.tools.json_calls import hermes_calls, llama_calls, mistral_calls
from rl_megatron.rollouts.tools.pythonic_calls import pythonic_calls
from rl_megatron.rollouts.tools.xml_calls import qwen_calls

PARSERS: Mapping[str, Parser] = MappingProxyType({
    "hermes": hermes_calls,
    "qwen": qwen_calls,
    "llama": llama_calls,
    "mistral": mistral_calls,
    "pythonic": pythonic_calls,
})  # fmt: skip
# What the text of a chat template has if the model writes calls in a format.
_SIGNS: Mapping[str, Callable[[str], bool]] = MappingProxyType({
    "hermes": lambda text: "<tool_call>" in text and "<function=" not in text and "<arg_key>" not in text,
    "qwen": lambda text: "<tool_call>" in text and "<function=" in text,
    "llama": lambda text: "<|python_tag|>" in text or '{"name": function name, "parameters":' in text,
    "mistral": lambda text: "[TOOL_CALLS]" in text,
    "pythonic": lambda text: re.search(r"\[func(?:tion|_name)?1?\(\w+=", text) is not None,
})  # fmt: skip


def format_of(template: str, key: str = "rollout.tools.format") -> str:
    """Return the format that the text of a chat template asks for. Messages name the configuration key.

    Raises:
        ConfigError: It asks for none that is known, or for several.
    """
    found = [name for name, sign in _SIGNS.items() if sign(template)]
    if len(found) == 1:
        return found[0]
    what = f"has signs of several formats ({', '.join(found)})" if found else "has no sign of a format of tool calls"
    raise ConfigError(
        f"the chat template, which {key}=auto looks into, {what}; set {key} to one of {', '.join(PARSERS)}"
    )

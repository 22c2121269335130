"""The formats in which models write calls of tools, and the detection of the format from a chat template's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rl_megatron.config.errors import ConfigError
from rl_megatron.rollouts.tools.calls import Parser
from rl_megatron.rollouts.tools.json_calls import parse_hermes, parse_llama, parse_mistral
from rl_megatron.rollouts.tools.pythonic_calls import parse_pythonic
from rl_megatron.rollouts.tools.xml_calls import parse_qwen

PARSERS: Mapping[str, Parser] = MappingProxyType({
    "hermes": parse_hermes,
    "qwen": parse_qwen,
    "llama": parse_llama,
    "mistral": parse_mistral,
    "pythonic": parse_pythonic,
})  # fmt: skip
# For each format, whether the text of a chat template asks the model for calls in it.
_SIGNS: Mapping[str, Callable[[str], bool]] = MappingProxyType({
    "hermes": lambda text: "<tool_call>" in text and "<function=" not in text and "<arg_key>" not in text,
    "qwen": lambda text: "<tool_call>" in text and "<function=" in text,
    "llama": lambda text: "<|python_tag|>" in text or '{"name": function name, "parameters":' in text,
    "mistral": lambda text: "[TOOL_CALLS]" in text,
    "pythonic": lambda text: re.search(r"\[func(?:tion|_name)?1?\(\w+=", text) is not None,
})  # fmt: skip


def detect_format(template: str, key: str = "rollout.tools.format") -> str:
    """Return the format that the text of a chat template asks for, or raise ConfigError, which names `key`."""
    formats = [name for name, sign in _SIGNS.items() if sign(template)]
    if len(formats) == 1:
        return formats[0]
    what = (
        f"has signs of several formats ({', '.join(formats)})" if formats else "has no sign of a format of tool calls"
    )
    raise ConfigError(f"{key}=auto: the chat template {what}; set {key} to one of {', '.join(PARSERS)}")

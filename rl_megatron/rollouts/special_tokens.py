"""Keep the texts of messages from making special tokens: only the chat template writes the markers of a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.data.conversations import Message
from rl_megatron.data.tokenizer import Tokenizer

_INVISIBLE = "\u200b"  # a space of no width


def without_special_tokens(message: Message, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a message or a tool, in whose texts no special token is spelled.

    The name of a special token gets an invisible character, in the content and also in the arguments of tool calls.
    """
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    return {str(key): value if key == "role" else _changed(value, names) for key, value in message.items()}


def _changed(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, str):
        for name in names:
            value = value.replace(name, name[:1] + _INVISIBLE + name[1:])
        return value
    if isinstance(value, Mapping):
        return {_changed(key, names): _changed(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(each, names) for each in value]
    return value

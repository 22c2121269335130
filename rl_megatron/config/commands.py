"""Write commands of `rl-megatron` that a user can copy into a shell."""

from __future__ import annotations

import re
import shlex

_UNQUOTED = r"[\w./:@%+-]+"  # a value of only these characters needs no quotes in Hydra's syntax
_NOT_TEXT = r"(?i)null|true|false|[+-]?(nan|inf|[\d_.]+(e[+-]?\d+)?)"  # Hydra does not read these as texts


def format_command(*words: str) -> str:
    """Return `rl-megatron` with these arguments, quoted for a shell."""
    return shlex.join(("rl-megatron", *words))


def format_override(key: str, value: str) -> str:
    """Return `key=value` in Hydra's syntax, where `value` is a text."""
    plain = re.fullmatch(_UNQUOTED, value, re.ASCII) and not re.fullmatch(_NOT_TEXT, value)
    return f"{key}={value if plain else _quote(value)}"


def format_list_override(key: str, value: str) -> str | None:
    """Return `key=[…]` in Hydra's syntax, where `value` is a list whose strings may lack quotes.

    Numbers and quoted texts stay as they are. The result is None if the list has lists or mappings in it.
    """
    items = [item.strip() for item in value.strip().removeprefix("[").removesuffix("]").split(",")]
    if any(item.startswith(("[", "{")) for item in items):
        return None
    as_is = [item[:1] in ("'", '"') or re.fullmatch(_NOT_TEXT, item) for item in items]
    return f"{key}=[{','.join(item if keep else _quote(item) for item, keep in zip(items, as_is, strict=True))}]"


def _quote(value: str) -> str:
    """Return a text in double quotes. Hydra reads a backslash literally, unless a quote follows it."""
    return '"' + re.sub(r'(\\*)(?="|$)', r"\1\1", value).replace('"', '\\"') + '"'

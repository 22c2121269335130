"""Write commands of `rl-megatron` that a user can copy into a shell."""

from __future__ import annotations

import json
import re
import shlex

_UNQUOTED = r"[\w./:@%+-]+"  # what a value in Hydra's syntax may have without quotes


def command(*words: str) -> str:
    """Return `rl-megatron` with these arguments, quoted for a shell."""
    return shlex.join(("rl-megatron", *words))


def override(key: str, value: str) -> str:
    """Return `key=value` in Hydra's syntax."""
    plain = re.fullmatch(_UNQUOTED, value, re.ASCII)
    return f"{key}={value if plain else json.dumps(value, ensure_ascii=False)}"

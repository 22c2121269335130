"""Leave secrets out of a configuration that is written or printed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_megatron import log

# Keys of options and of users' own settings. Keys such as stop_tokens and micro_batch_tokens hold no secrets.
_SECRET_KEY = re.compile(
    r"(^|[_-])((api|secret|private|access)[_-]?key|secret|password|passwd|passphrase|credentials?|authorization)$",
    re.IGNORECASE,
)
_TOKEN_KEY = re.compile(r"^((access|auth|api|bearer|hf|hub)[_-])?token$", re.IGNORECASE)


def without_secrets(value: object) -> Any:
    """Return a configuration, as plain mappings and lists, in which `***` stands for each secret.

    A secret is the value of a key such as `api_key`, the user and password of an address, the argument after an option
    such as `--api-key`, or the value of an environment variable such as HF_TOKEN.
    """
    if isinstance(value, Mapping):
        return {
            key: log.REDACTED if isinstance(item, str) and _is_secret(str(key)) else without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        hidden, result = False, []
        for item in value:
            result.append(log.REDACTED if hidden and isinstance(item, str) else without_secrets(item))
            hidden = isinstance(item, str) and item.startswith("-") and _is_secret(item.lstrip("-").replace("-", "_"))
        return result
    return log.redact(value) if isinstance(value, str) else value


def _is_secret(key: str) -> bool:
    return bool(_SECRET_KEY.search(key) or _TOKEN_KEY.search(key))

"""What Hugging Face tokenizer files declare besides the vocabulary: named special tokens and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The special tokens that chat templates can name.
_NAMED_TOKENS = tuple(f"{role}_token" for role in "bos eos unk sep pad cls mask".split())


def declared_tokens(config: Mapping[str, Any], side_files: Mapping[str, str]) -> dict[str, str]:
    """Return the named special tokens that a tokenizer's files declare."""
    declared = json.loads(side_files.get("special_tokens_map.json", "{}")) | {
        key: value for key, value in config.items() if value is not None
    }
    texts = {name: _token_text(declared.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def declared_by(tokenizer: Any) -> dict[str, Any]:
    """Return what a Hugging Face tokenizer object declares that its backend does not: named tokens, chat template."""
    declared = dict(getattr(tokenizer, "special_tokens_map", {}))
    template = getattr(tokenizer, "chat_template", None)
    return declared if template is None else declared | {"chat_template": template}


def _token_text(declared: str | Mapping[str, Any] | None) -> str | None:
    """Return the text of a special token, which Hugging Face writes as a string or as `{"content": …}`."""
    return declared["content"] if isinstance(declared, Mapping) else declared


def chat_templates(config: Mapping[str, Any], side_files: Mapping[str, str]) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name. Like transformers, prefer those in files of their own."""
    from_files = {
        "default" if name == "chat_template.jinja" else Path(name).stem: text
        for name, text in side_files.items()
        if name.endswith(".jinja")
    }
    declared = config.get("chat_template")
    if from_files or declared is None:
        return from_files
    if isinstance(declared, str):
        return {"default": declared}
    if isinstance(declared, Mapping):
        return dict(declared)
    return {template["name"]: template["template"] for template in declared}

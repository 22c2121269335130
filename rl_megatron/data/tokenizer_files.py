"""Read a tokenizer from a Hugging Face directory or a `tokenizer.json`. Nothing is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.tokenizer_declarations import declared_tokens

# Further tokenizer files of a Hugging Face directory. `Tokenizer.save` writes them, so that an export loses nothing.
_SIDE_FILES = ("special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/*.jinja")


def load_tokenizer(
    path: str | os.PathLike[str], *, eos_token: str | None = None, pad_token: str | None = None
) -> Tokenizer:
    """Return the tokenizer in a Hugging Face directory or a `tokenizer.json`.

    A directory with a `tokenizer.json` is read directly; any other is converted by `transformers`, which takes seconds.

    Args:
        path: The directory or the file. Nothing is downloaded.
        eos_token: Overrides the token in `tokenizer_config.json` or `special_tokens_map.json`.
        pad_token: Overrides the token in `tokenizer_config.json` or `special_tokens_map.json`.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: No end-of-sequence token is declared, or the directory has no readable tokenizer.
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"there is no tokenizer at {source}: give a Hugging Face directory or tokenizer.json.")
    directory, file = (source, source / "tokenizer.json") if source.is_dir() else (source.parent, source)
    side_files = {
        side_file.relative_to(directory).as_posix(): side_file.read_text("utf-8")
        for pattern in _SIDE_FILES
        for side_file in sorted(directory.glob(pattern))
    }
    config_file = directory / "tokenizer_config.json"
    config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
    declared = declared_tokens(config, side_files)
    eos_token = eos_token or declared.get("eos_token")
    pad_token = pad_token or declared.get("pad_token")
    if eos_token is None:
        raise ValueError(
            f"{directory} declares no eos_token, which ends documents and answers: add it to tokenizer_config.json, or "
            "pass eos_token=…."
        )
    backend = _read_backend(file) if file.is_file() else _converted_backend(directory)
    return Tokenizer(backend, eos_token, pad_token, config, side_files)


def _read_backend(file: Path) -> Backend:
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error


def _converted_backend(directory: Path) -> Any:
    """Return the fast tokenizer that `transformers` converts files such as `tokenizer.model` or `vocab.json` to."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        files = sorted(entry.name for entry in directory.iterdir())[:20]
        raise ValueError(
            f"{directory} has no tokenizer.json (its files: {', '.join(files) or 'none'}), and transformers reads no "
            f"tokenizer from it either: {error}"
        ) from error
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise ValueError(
            f"{directory} has a {type(loaded).__name__}, which has no fast form: convert it to a tokenizer.json."
        )
    return loaded.backend_tokenizer

"""Read prompts (texts, conversations or token ids) from files, to sample completions outside of training.

This module uses the readers and the renderer of training data, so that a prompt has the same tokens as in a run. It
does not import torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rl_megatron.config.data_sources import PromptsConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import DataConfig
from rl_megatron.data.encoding import Limit, apply_limit, truncate_prompt
from rl_megatron.data.files import build_reader, find_files
from rl_megatron.data.readers import Lines
from rl_megatron.data.records import Joined, Reader, Record, Renamed
from rl_megatron.data.rendering import Renderer
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.log import track

IDS = "prompt_ids"  # the field of a record that holds a prompt as token ids
# The keys of a data section that decide how records become prompts.
RENDERING_KEYS = (
    "split", "columns", "format", "prompt_template", "system_prompt", "chat_template", "chat_template_kwargs",
    "too_long",
)  # fmt: skip


class PromptLines(Lines):
    """A text file with one prompt per line. Line breaks are removed, and blank lines are skipped."""

    def _record(self, line: bytes, number: int) -> Record | None:
        text = self._text(line, number).rstrip("\r\n")
        return Record({"prompt": text}, f"{self.file}:{number}") if text.strip() else None


@dataclass(frozen=True)
class FilePrompt:
    """A prompt of a file.

    Attributes:
        number: The number of its record, counted from 0 over all files.
        num_prefix: The number of tokens that the tokenizer puts before every text (BOS). Truncation keeps them.
    """

    number: int
    ids: list[int]
    record: Record
    num_prefix: int = 0

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    def truncate(self, limit: int) -> FilePrompt | None:
        """Keep the prefix and the last `limit - num_prefix` tokens; return None if the latter are 0 or fewer."""
        ids = truncate_prompt(self.ids, self.num_prefix, limit)
        return None if ids is None else replace(self, ids=ids)


@dataclass(frozen=True)
class FilePrompts:
    """The prompts of the files, in order, and the token with which the chat template ends a completion, if any."""

    prompts: list[FilePrompt]
    end_of_turn_ids: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Return a digest of the numbers and the tokens of all prompts."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.number, prompt.ids]).encode())
        return digest.hexdigest()[:16]


def build_prompts_config(data: DataConfig, path: str) -> PromptsConfig:
    """Return the data section for the prompts at `path`, with the `RENDERING_KEYS` of `data`."""
    return PromptsConfig(path=path, **{key: getattr(data, key) for key in RENDERING_KEYS})


def read_prompts(
    data: PromptsConfig, tokenizer: Tokenizer, max_sequence_length: int, max_new_tokens: int
) -> FilePrompts:
    """Return the prompts at `data.path` as tokens; each leaves space for a completion.

    A record is a prompt as text, a conversation, a line of a text file, or token ids in the field `prompt_ids`.
    `data.too_long` decides what happens to a prompt that leaves too little space.
    """
    try:
        return _read_prompts(data, tokenizer, max_sequence_length, max_new_tokens)
    except (ValueError, OSError) as error:  # the readers name data.path, but the user set --prompts
        raise ConfigError(str(error).replace("data.path", "--prompts")) from error


def _read_prompts(
    data: PromptsConfig, tokenizer: Tokenizer, max_sequence_length: int, max_new_tokens: int
) -> FilePrompts:
    assert data.path is not None
    reader: Reader = Joined([build_reader(file, PromptLines) for file in find_files(data.path, data.split).train])
    if data.columns:
        reader = Renamed(reader, data.columns)
    records, renderer = reader.all(), Renderer(data, tokenizer)
    prompts = [
        _encode_prompt(number, record, renderer, tokenizer)
        for number, record in enumerate(track(records, "tokenized prompts", len(records)))
    ]
    limit = Limit.for_prompts(max_sequence_length, max_new_tokens, data.too_long)
    return FilePrompts(apply_limit(prompts, limit), renderer.end_of_turn_ids)


def _encode_prompt(number: int, record: Record, renderer: Renderer, tokenizer: Tokenizer) -> FilePrompt:
    prefix = tokenizer.prefix_ids
    ids = _read_ids(record, tokenizer) if IDS in record.values else renderer.encode_prompt(record)
    return FilePrompt(number, ids, record, len(prefix) if ids[: len(prefix)] == prefix else 0)


def _read_ids(record: Record, tokenizer: Tokenizer) -> list[int]:
    """Return the token ids in a record: at least one, and all in the vocabulary."""
    ids = record.values[IDS]
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        raise ValueError(f"{record.location}: {IDS}={ids!r:.60} must be a list of at least one token id.")
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < tokenizer.vocab_size:
            raise ValueError(
                f"{record.location}: {IDS}[{position}]={token!r} is not a token of the tokenizer, whose ids are 0 to "
                f"{tokenizer.vocab_size - 1}; correct it, or set tokenizer.path."
            )
    return list(ids)

"""`Tokenizer` converts text to token ids and back. Its files declare special tokens and chat templates."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from rl_megatron.log import once

_VISIBLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER_BYTES = (byte for byte in range(0x100) if byte not in _VISIBLE_BYTES)
# The byte that each character of a byte-level vocabulary stands for.
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE_BYTES} | {chr(0x100 + n): b for n, b in enumerate(_OTHER_BYTES)}
_MOST_BYTES = 4  # the most bytes of a character in UTF-8
_SHORT = 4096  # characters; encoding a longer text lets other threads run
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the text of bytes that are not a character


class Tokenizer:
    """A `tokenizers.Tokenizer` with its end-of-sequence and padding tokens.

    `encode` never makes a special token from text. So a document that contains the characters `<eos>` cannot end a
    sequence, and `decode(encode(text))` returns the text. Special tokens are written with `encode_template` and
    `encode_special`.

    Args:
        backend: A `tokenizers.Tokenizer`, or a Hugging Face fast tokenizer that has one. It is copied, not changed.
        eos_token: The end-of-sequence token, which must be in the vocabulary.
        pad_token: The padding token, which must be in the vocabulary. None pads with the end-of-sequence token, which
            is safe because masks and `input_lengths`, not ids, mark padding.
        config: The `tokenizer_config.json`, kept for `save`.
        side_files: Name → text of further files that `save` writes.

    Several threads may use a tokenizer at the same time.

    Attributes:
        chat_templates: Name → Jinja text of the chat templates. The name of the usual one is "default".
        longest_token: The number of characters of the vocabulary's longest token.
    """

    def __init__(
        self,
        backend: Any,
        eos_token: str,
        pad_token: str | None = None,
        config: Mapping[str, Any] | None = None,
        side_files: Mapping[str, str] | None = None,
    ) -> None:
        self._config = read_declarations(backend) | dict(config or {})
        backend = getattr(backend, "backend_tokenizer", backend)
        self._backend = Backend.from_str(backend.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self._side_files = dict(side_files or {})
        self.eos_token = eos_token
        self.pad_token = eos_token if pad_token is None else pad_token
        self.eos_id = self._find_id(self.eos_token, "eos_token")
        self.pad_id = self._find_id(self.pad_token, "pad_token")
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.longest_token = max(map(len, vocabulary))
        self.special_tokens: dict[str, int] = {
            token.content: token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._added = frozenset(self._backend.get_added_tokens_decoder())
        # The ids that the tokenizer puts before every text (such as Llama's BOS), without an <eos> that it appends.
        of_no_text = self._backend.encode("").ids
        self.prefix_ids: list[int] = of_no_text[:-1] if of_no_text[-1:] == [self.eos_id] else of_no_text
        self.chat_templates = read_chat_templates(self._config, self._side_files)
        self._backend.encode_special_tokens = True  # "<eos>" in a text is five characters

    def leave_out_special_tokens_from(self, num_ids: int) -> None:
        """Remove the special tokens with ids of `num_ids` or more, if all tokens with such ids are special.

        A model without embedding rows for them cannot read them, and text never contains them: for example, the image
        token of Gemma 3's text models. Their names become ordinary text. Tokens that are needed (end of sequence,
        padding, BOS) are never removed.
        """
        beyond = {token: token_id for token, token_id in self.special_tokens.items() if token_id >= num_ids}
        needed = {self.eos_id, self.pad_id, *self.prefix_ids}
        if not beyond or needed & set(beyond.values()) or self.vocab_size - num_ids != len(beyond):
            return
        once(f"the tokenizer's {', '.join(beyond)} are not used: the model's embedding has only {num_ids} rows")
        self.special_tokens = {token: id_ for token, id_ in self.special_tokens.items() if token not in beyond}
        self.vocab_size = num_ids

    @cached_property
    def definition(self) -> str:
        """Return the content of `tokenizer.json`, always the same object, so that a pickle contains it only once."""
        return self._backend.to_str()

    @cached_property
    def _special_backend(self) -> Backend:
        """Return a copy that recognises special tokens. Switching the original would affect other threads' calls."""
        return Backend.from_str(self.definition)

    @property
    def digest(self) -> str:
        """Return a fingerprint of the tokenizer's definition. Equal definitions give every text the same ids."""
        return hashlib.blake2b(self.definition.encode(), digest_size=16).hexdigest()

    def _find_id(self, token: str, role: str) -> int:
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"{role} {token!r} is not in the tokenizer's vocabulary: use a token that is.")
        return token_id

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without special tokens before, in or after it."""
        return _encode(self._backend, text).ids

    def encode_template(self, template: str, values: Mapping[str, object]) -> list[int]:
        """Return the token ids of `template.format(**values)`.

        Special tokens that are spelled in the template become special tokens. Those that are spelled in the values stay
        text, so that data cannot forge the markers of a chat format.
        """
        if not self.special_tokens:
            return self.encode(template.format_map(values))
        longest_first = sorted(self.special_tokens, key=len, reverse=True)
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", template):
            if part in self.special_tokens:
                ids.append(self.special_tokens[part])
            elif part:
                ids += self.encode(part.format_map(values))
        return ids

    def encode_special(self, text: str) -> Encoding:
        """Return the encoding of `text`, in which special tokens are recognised.

        Nothing is put before or after the text: the encoding has a BOS token only if the text spells it.
        """
        encoding = _encode(self._special_backend, text)
        beyond = next((id_ for id_ in encoding.ids if id_ >= self.vocab_size), None)
        if beyond is not None:
            raise ValueError(
                f"{self._backend.id_to_token(beyond)!r} is a special token that the model has no embedding row for: "
                "raise model.vocab_size, or use another chat template."
            )
        return encoding

    def is_added(self, token_id: int) -> bool:
        """Return whether a token was added to the vocabulary, as special tokens are, rather than made by merges."""
        return token_id in self._added

    @property
    def named_tokens(self) -> dict[str, str]:
        """Return the special tokens that chat templates can name, such as {"bos_token": "<s>"}."""
        return read_named_tokens(self._config, self._side_files) | {"eos_token": self.eos_token}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, without special tokens unless `skip_special_tokens` is false."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """Return the text of a token that follows another, with its leading space if it has one."""
        first = self.decode([token_id], skip_special_tokens=False)
        return self.decode([token_id, token_id], skip_special_tokens=False)[len(first) :]  # keeps a leading space

    def decode_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. Joined, they are the text of `ids`, with special tokens.

        If several tokens encode one character, the first gets its text, and the others get none. A token that belongs
        to no character is written as its bytes, as in `<0xE2>`.
        """
        texts = [self.decode_token(token_id) for token_id in ids]
        first = 0
        while first < len(texts):
            if _REPLACEMENT in texts[first]:
                last = self._find_character_end(ids, texts, first)
                whole = self.decode(ids[first:last], skip_special_tokens=False)
                broken = _REPLACEMENT in whole
                texts[first:last] = [self._spell_bytes(ids[first])] if broken else [whole] + [""] * (last - first - 1)
            first += 1
        return texts

    def _find_character_end(self, ids: Sequence[int], texts: Sequence[str], first: int) -> int:
        """Return the end index of the tokens from `first` on that encode one character; `first + 1` if none do."""
        for last in range(first + 1, min(first + _MOST_BYTES, len(texts)) + 1):
            if _REPLACEMENT not in texts[last - 1]:
                break
            if _REPLACEMENT not in self.decode(ids[first:last], skip_special_tokens=False):
                return last
        return first + 1

    def _spell_bytes(self, token_id: int) -> str:
        """Return the bytes of a token of a byte-level vocabulary, or its name in another vocabulary."""
        name = self._backend.id_to_token(token_id) or ""
        is_byte_level = all(character in _BYTE_OF for character in name)
        return "".join(f"<0x{_BYTE_OF[character]:02X}>" for character in name) if is_byte_level else name

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a Hugging Face tokenizer directory, which `load_tokenizer` and `transformers.AutoTokenizer` read."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | self._config
        config |= {"eos_token": self.eos_token, "pad_token": self.pad_token}
        self._backend.save(str(target / "tokenizer.json"))
        (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
        for name, text in self._side_files.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_text(text, "utf-8")


def _encode(backend: Backend, text: str) -> Encoding:
    if len(text) <= _SHORT:
        return backend.encode(text, add_special_tokens=False)
    (encoding,) = backend.encode_batch([text], add_special_tokens=False)  # `encode` would block other threads
    return encoding


# The special tokens that chat templates can name.
_NAMED_TOKENS = tuple(f"{role}_token" for role in "bos eos unk sep pad cls mask".split())


def read_named_tokens(config: Mapping[str, object], side_files: Mapping[str, str]) -> dict[str, str]:
    """Return the named special tokens that a tokenizer's files declare."""
    declared = json.loads(side_files.get("special_tokens_map.json", "{}")) | {
        key: value for key, value in config.items() if value is not None
    }
    texts = {name: _get_content(declared.get(name)) for name in _NAMED_TOKENS}
    return {name: text for name, text in texts.items() if text is not None}


def read_declarations(tokenizer: object) -> dict[str, object]:
    """Return what a Hugging Face tokenizer declares besides its backend: named tokens and a chat template."""
    declared = dict(getattr(tokenizer, "special_tokens_map", {}))
    template = getattr(tokenizer, "chat_template", None)
    return declared if template is None else declared | {"chat_template": template}


def _get_content(declared: str | Mapping[str, Any] | None) -> str | None:
    """Return the text of a special token, which Hugging Face writes as a string or as `{"content": …}`."""
    return declared["content"] if isinstance(declared, Mapping) else declared


def read_chat_templates(config: Mapping[str, Any], side_files: Mapping[str, str]) -> dict[str, str]:
    """Return the chat templates of a tokenizer by name. As in transformers, separate files take precedence."""
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

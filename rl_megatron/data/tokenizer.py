"""Text to token ids and back: any Hugging Face tokenizer, or a byte-level BPE trained here."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from rl_megatron.log import once

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
MIN_BPE_VOCAB_SIZE = 258  # every byte, pad and eos

# What else a Hugging Face directory says about its tokenizer: `save` writes it back, so an export loses nothing.
_SIDE_FILES = ("special_tokens_map.json", "chat_template.jinja")


class Tokenizer:
    """A `tokenizers.Tokenizer` with its end-of-sequence and padding tokens.

    Text is only ever text: `encode` never reads a special token out of it, so a document that spells `<eos>` cannot end
    a sequence, and `decode(encode(text))` gives it back. `encode_template` is the way to write special tokens.

    Args:
        backend: a `tokenizers.Tokenizer`, or a Hugging Face fast tokenizer that holds one. Copied, not changed.
        eos_token: must be in the vocabulary.
        pad_token: must be in the vocabulary; None pads with the end-of-sequence token, which is safe because masks and
            `input_lengths`, never ids, tell padding from text.
        config: the contents of its `tokenizer_config.json`, kept for `save`.
        side_files: name → text of further files to save with it.

    Raises:
        ValueError: a token that is not in the vocabulary.
    """

    def __init__(
        self,
        backend: Any,
        eos_token: str,
        pad_token: str | None = None,
        config: Mapping[str, Any] | None = None,
        side_files: Mapping[str, str] | None = None,
    ) -> None:
        backend = getattr(backend, "backend_tokenizer", backend)
        self._backend = Backend.from_str(backend.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self._config = dict(config or {})
        self._side_files = dict(side_files or {})
        self.eos_token = eos_token
        self.pad_token = eos_token if pad_token is None else pad_token
        self.eos_id = self._id_of(self.eos_token, "eos_token")
        self.pad_id = self._id_of(self.pad_token, "pad_token")
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.special_tokens: dict[str, int] = {
            token.content: token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.prefix_ids = self._prefix_ids()
        self._backend.encode_special_tokens = True  # "<eos>" in a text is five characters

    def leave_out_special_tokens_from(self, num_ids: int) -> None:
        """Forgets special tokens with ids from `num_ids` on, where there are no others: markers that a model has no row
        for and no text can hold, such as the image token of Gemma 3's text models. Their names become text."""
        beyond = {token: token_id for token, token_id in self.special_tokens.items() if token_id >= num_ids}
        needed = {self.eos_id, self.pad_id, *self.prefix_ids}
        if not beyond or needed & set(beyond.values()) or self.vocab_size - num_ids != len(beyond):
            return
        once(f"the tokenizer's {', '.join(beyond)} are left out: the model has {num_ids} rows in its embedding")
        self.special_tokens = {token: id_ for token, id_ in self.special_tokens.items() if token not in beyond}
        self.vocab_size = num_ids

    @property
    def digest(self) -> str:
        """A fingerprint of what text becomes which ids: equal for tokenizers that can stand in for each other."""
        return hashlib.blake2b(self._backend.to_str().encode(), digest_size=16).hexdigest()

    def _id_of(self, token: str, role: str) -> int:
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"{role} {token!r} is not in the tokenizer's vocabulary: name one that is.")
        return token_id

    def _prefix_ids(self) -> list[int]:
        """What the tokenizer itself puts before every text (such as Llama's BOS); what it puts behind is not kept."""
        alone = self._backend.encode("").ids
        return alone[:-1] if alone and alone[-1] == self.eos_id else alone

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens before, in or behind it."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_template(self, template: str, values: Mapping[str, Any]) -> list[int]:
        """Token ids of `template.format(**values)`, where special tokens spelled in the template become special.

        Those spelled in the values stay text, so data cannot forge the markers of a chat format.

        Raises:
            KeyError: a field of the template is missing in `values`.
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

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; special tokens are left out unless asked for."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a Hugging Face tokenizer directory, which `load_tokenizer` and `transformers.AutoTokenizer` read."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | self._config
        config |= {"eos_token": self.eos_token, "pad_token": self.pad_token}
        self._backend.save(str(target / "tokenizer.json"))
        (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
        for name, text in self._side_files.items():
            (target / name).write_text(text, "utf-8")


def load_tokenizer(
    path: str | os.PathLike[str], *, eos_token: str | None = None, pad_token: str | None = None
) -> Tokenizer:
    """A tokenizer from a Hugging Face directory or a `tokenizer.json`.

    A directory with a `tokenizer.json` is read directly; any other is converted by `transformers`, which takes seconds.

    Args:
        path: the directory or the file. Nothing is downloaded.
        eos_token, pad_token: override what `tokenizer_config.json` and `special_tokens_map.json` say.

    Raises:
        FileNotFoundError: nothing at `path`.
        ValueError: no end-of-sequence token is declared, or the directory holds no tokenizer that can be read.
    """
    source = Path(path)
    if not source.exists():
        raise FileNotFoundError(f"no tokenizer at {source}: give a Hugging Face directory or a tokenizer.json.")
    directory, file = (source, source / "tokenizer.json") if source.is_dir() else (source.parent, source)
    side_files = {name: (directory / name).read_text("utf-8") for name in _SIDE_FILES if (directory / name).is_file()}
    config_file = directory / "tokenizer_config.json"
    config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
    declared = json.loads(side_files.get("special_tokens_map.json", "{}")) | {
        key: value for key, value in config.items() if value is not None
    }
    eos_token = eos_token or _token_text(declared.get("eos_token"))
    pad_token = pad_token or _token_text(declared.get("pad_token"))
    if eos_token is None:
        raise ValueError(f"{directory} declares no eos_token, which ends documents and answers: pass eos_token=….")
    backend = _read_backend(file) if file.is_file() else _converted_backend(directory)
    return Tokenizer(backend, eos_token, pad_token, config, side_files)


def _read_backend(file: Path) -> Backend:
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error


def _token_text(declared: str | Mapping[str, Any] | None) -> str | None:
    """Hugging Face writes a special token as a string or as `{"content": …}`."""
    return declared["content"] if isinstance(declared, Mapping) else declared


def _converted_backend(directory: Path) -> Any:
    """The fast tokenizer that `transformers` makes of vocabulary files such as `tokenizer.model` or `vocab.json`."""
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        files = sorted(entry.name for entry in directory.iterdir())[:20]
        raise ValueError(
            f"{directory} holds no tokenizer.json (its files: {', '.join(files) or 'none'}), and transformers reads no "
            f"tokenizer from it either: {error}"
        ) from error
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise ValueError(
            f"{directory} holds a {type(loaded).__name__}, which has no fast form: convert it to a tokenizer.json."
        )
    return loaded.backend_tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int, *, digits: bool = True) -> Tokenizer:
    """A byte-level BPE tokenizer learned from `texts`: lossless on any text, the same for the same corpus.

    Args:
        texts: the corpus, read once.
        vocab_size: at most this many tokens, of which 256 bytes, `<pad>` (id 0) and `<eos>` (id 1). A small corpus has
            too few repeated pairs to reach it: `Tokenizer.vocab_size` tells the actual size.
        digits: each digit is a token of its own, so that numbers of equal length have equal shape.

    Raises:
        ValueError: `vocab_size` has no room for all bytes.
    """
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size = {vocab_size}: byte-level BPE needs at least {MIN_BPE_VOCAB_SIZE} "
            f"(256 bytes, {PAD_TOKEN} and {EOS_TOKEN}); raise it."
        )
    backend = Backend(models.BPE())
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitters = [pre_tokenizers.Digits(individual_digits=True), bytes_of_words] if digits else [bytes_of_words]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair seen once is no pattern
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, EOS_TOKEN, PAD_TOKEN)

"""The tokenizer of a run: loaded from files or trained once, and kept in the run's output directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from rl_megatron import log
from rl_megatron.config.checkpoint_metadata import has_tokenizer
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.hub import explain_download
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.sources import build_source
from rl_megatron.data.tokenizer import Tokenizer, read_named_tokens

TOKENIZER = "tokenizer"  # a subdirectory of the run's output directory


def build_tokenizer(stage: StageConfig) -> Tokenizer:
    """Return the tokenizer at `tokenizer.path` or, if that is not set, a BPE trained on the stage's training text."""
    if stage.tokenizer.path is not None:
        try:
            return load_tokenizer(stage.tokenizer.path)
        except (ValueError, OSError) as error:
            raise ConfigError(f"tokenizer.path={stage.tokenizer.path}: {error}") from error
    if stage.data.streaming:
        log.once(
            f"the tokenizer is trained on the first {stage.data.shuffle_block} streamed records (data.shuffle_block); "
            "raise this key, or set tokenizer.path to a tokenizer trained on all data"
        )
    return train_bpe(build_source(stage).texts(), stage.tokenizer.vocab_size)


def get_run_tokenizer(stage: StageConfig, output_dir: Path) -> Tokenizer:
    """Return the tokenizer that the run in `output_dir` saved or, for a new run, the one that `stage` configures.

    It is the same on every rank, because training a BPE is deterministic. Special tokens without an embedding in the
    model are left out.
    """
    saved = output_dir / TOKENIZER
    tokenizer = load_tokenizer(saved) if saved.is_dir() else build_tokenizer(stage)
    if stage.model.vocab_size is not None:
        tokenizer.leave_out_special_tokens_from(stage.model.vocab_size)
    return tokenizer


def load_known_tokenizer(stage: StageConfig, output_dir: Path) -> Tokenizer | None:
    """Return the run's tokenizer, or None if it would have to be trained or converted, which takes time."""
    if not (output_dir / TOKENIZER).is_dir():
        if stage.tokenizer.path is None:
            return None
        path = Path(stage.tokenizer.path)
        if path.is_dir() and has_tokenizer(path) and not (path / "tokenizer.json").is_file():
            return None
    return get_run_tokenizer(stage, output_dir)


def save_tokenizer(tokenizer: Tokenizer, output_dir: Path) -> None:
    """Save the run's tokenizer in `output_dir` atomically; do nothing if it has been saved already."""
    final = output_dir / TOKENIZER
    if not final.is_dir():
        partial = final.with_suffix(".incomplete")
        tokenizer.save(partial)
        partial.rename(final)


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
        download = explain_download(source)
        raise FileNotFoundError(
            f"there is no tokenizer at {source}: give a Hugging Face directory or tokenizer.json{download or '.'}"
        )
    directory, file = (source, source / "tokenizer.json") if source.is_dir() else (source.parent, source)
    side_files = {
        side_file.relative_to(directory).as_posix(): side_file.read_text("utf-8")
        for pattern in _SIDE_FILES
        for side_file in sorted(directory.glob(pattern))
    }
    config_file = directory / "tokenizer_config.json"
    config = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
    declared = read_named_tokens(config, side_files)
    eos_token = eos_token or declared.get("eos_token")
    pad_token = pad_token or declared.get("pad_token")
    if eos_token is None:
        raise ValueError(
            f"{directory} declares no eos_token, which ends documents and answers: add it to tokenizer_config.json, or "
            "pass eos_token=…."
        )
    backend = _read_backend(file) if file.is_file() else _convert_backend(directory)
    return Tokenizer(backend, eos_token, pad_token, config, side_files)


def _read_backend(file: Path) -> Backend:
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises no narrower class
        raise ValueError(f"{file} cannot be read as a tokenizer: {error}") from error


def _convert_backend(directory: Path) -> Backend:
    """Return the fast tokenizer that `transformers` makes from files such as `tokenizer.model` or `vocab.json`."""
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


PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
MIN_BPE_VOCAB_SIZE = 258  # every byte, pad and eos


def train_bpe(texts: Iterable[str], vocab_size: int, *, digits: bool = True) -> Tokenizer:
    """Return a byte-level BPE tokenizer learned from `texts`. It is lossless on any text, and deterministic.

    Args:
        texts: The corpus, read once.
        vocab_size: The maximum number of tokens, including 256 bytes, `<pad>` (id 0) and `<eos>` (id 1). A small corpus
            may have too few repeated pairs to reach this number; `Tokenizer.vocab_size` is the actual size.
        digits: Whether each digit is a separate token, so that numbers of equal length have equally many tokens.

    Raises:
        ValueError: `vocab_size` is too small for all bytes.
    """
    if vocab_size < MIN_BPE_VOCAB_SIZE:
        raise ValueError(
            f"tokenizer.vocab_size = {vocab_size} must be at least {MIN_BPE_VOCAB_SIZE} for a byte-level BPE "
            f"(256 bytes, {PAD_TOKEN} and {EOS_TOKEN}); raise it."
        )
    backend = Backend(models.BPE())
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    splitters = [pre_tokenizers.Digits(individual_digits=True), bytes_of_words] if digits else [bytes_of_words]
    backend.pre_tokenizer = pre_tokenizers.Sequence(splitters)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,  # a pair that occurs once would only waste a token
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, EOS_TOKEN, PAD_TOKEN)

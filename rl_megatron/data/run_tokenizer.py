"""Load or train the tokenizer of a run once, and keep it in the run's output directory."""

from __future__ import annotations

from pathlib import Path

from rl_megatron import log
from rl_megatron.config.checkpoint_metadata import has_tokenizer
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.byte_level_bpe import train_bpe
from rl_megatron.data.sources import build_source
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.tokenizer_files import load_tokenizer

TOKENIZER = "tokenizer"  # a subdirectory of the run's output directory


def build_tokenizer(stage: StageConfig) -> Tokenizer:
    """Return the tokenizer at `tokenizer.path` or, if it is not set, a BPE trained on the stage's training text."""
    if stage.tokenizer.path is not None:
        try:
            return load_tokenizer(stage.tokenizer.path)
        except (ValueError, OSError) as error:
            raise ConfigError(f"tokenizer.path={stage.tokenizer.path}: {error}") from error
    if stage.data.streaming:
        log.once(
            f"the tokenizer is trained on the first {stage.data.shuffle_block} streamed records (data.shuffle_block); "
            "raise it, or set tokenizer.path to a tokenizer of all of the data"
        )
    return train_bpe(build_source(stage).texts(), stage.tokenizer.vocab_size)


def run_tokenizer(stage: StageConfig, output_dir: Path) -> Tokenizer:
    """Return the tokenizer that the run in `output_dir` saved or, for a new run, the one that `stage` configures.

    It is the same on every rank, because training a BPE is deterministic. Special tokens that the model has no
    embedding for are left out.
    """
    saved = output_dir / TOKENIZER
    tokenizer = load_tokenizer(saved) if saved.is_dir() else build_tokenizer(stage)
    if stage.model.vocab_size is not None:
        tokenizer.leave_out_special_tokens_from(stage.model.vocab_size)
    return tokenizer


def known_tokenizer(stage: StageConfig, output_dir: Path) -> Tokenizer | None:
    """Return `run_tokenizer`, or None if it would have to be trained, or converted by transformers, which takes time.

    Raises:
        FileNotFoundError: There is nothing at `tokenizer.path`.
        ValueError: There is no tokenizer there, or it cannot be read.
    """
    if not (output_dir / TOKENIZER).is_dir():
        if stage.tokenizer.path is None:
            return None
        path = Path(stage.tokenizer.path)
        if path.is_dir() and has_tokenizer(path) and not (path / "tokenizer.json").is_file():
            return None
    return run_tokenizer(stage, output_dir)


def save_tokenizer(tokenizer: Tokenizer, output_dir: Path) -> None:
    """Save the run's tokenizer in `output_dir` atomically; do nothing if it has been saved already."""
    final = output_dir / TOKENIZER
    if not final.is_dir():
        partial = final.with_suffix(".incomplete")
        tokenizer.save(partial)
        partial.rename(final)

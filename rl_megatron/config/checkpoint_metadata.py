"""What a checkpoint carries besides weights: its model section, and the Hugging Face files that it came with. Read
without torch, so that a configuration can be made of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import ModelConfig

MANIFEST = "manifest.json"
HUGGING_FACE = "hugging_face"  # of an imported checkpoint, or of the run that began with one: all but the weights
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of these is there where a tokenizer is


def model_key(key: str, init_from: str | None) -> Any:
    """What the model of the checkpoint `init_from` has at `key`.

    Raises: ConfigError where there is no checkpoint, or it cannot be read.
    """
    if not init_from:
        raise ConfigError("model=init_from takes the model section of a checkpoint: add init_from=CHECKPOINT")
    return _model_section(Path(init_from))[key]


@lru_cache(maxsize=1)
def _model_section(checkpoint: Path) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    try:
        section = dict(json.loads(path.read_text("utf-8"))["model"])
    except FileNotFoundError as error:
        raise ConfigError(f"init_from={checkpoint} is no checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"init_from={checkpoint}: {MANIFEST} has no model section that can be read") from error
    known = asdict(ModelConfig())
    unknown = sorted(section.keys() - known.keys())
    if unknown:
        raise ConfigError(f"init_from={checkpoint}: {MANIFEST} has model.{unknown[0]}, which is not known here")
    return known | section  # keys since added had their default


def hugging_face_files(checkpoint: Path) -> Path | None:
    """The Hugging Face files, weights excepted, of the model that the checkpoint, or its run, began with."""
    return _carried(checkpoint, HUGGING_FACE, "config.json")


def carried_tokenizer(checkpoint: Path) -> Path | None:
    """The tokenizer directory among these files."""
    return _first_tokenizer(checkpoint, HUGGING_FACE)


def run_tokenizer(checkpoint: Path) -> Path | None:
    """The tokenizer directory of the run whose checkpoint it is."""
    return _first_tokenizer(checkpoint, "tokenizer")


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).is_file() for name in _TOKENIZERS)


def _first_tokenizer(checkpoint: Path, directory: str) -> Path | None:
    found = (_carried(checkpoint, directory, name) for name in _TOKENIZERS)
    return next((path for path in found if path is not None), None)


def _carried(checkpoint: Path, directory: str, file: str) -> Path | None:
    """`directory` in the checkpoint, or in the run whose checkpoint it is, where it has `file`."""
    checkpoint = checkpoint.absolute()
    homes = [checkpoint]
    if len(checkpoint.parents) > 2 and checkpoint.parents[1].name == "checkpoints":  # RUN/checkpoints/STAGE/step-N
        homes.append(checkpoint.parents[2])
    return next((home / directory for home in homes if (home / directory / file).is_file()), None)

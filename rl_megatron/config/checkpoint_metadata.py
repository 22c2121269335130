"""Read what a checkpoint has besides weights: its model section, and the Hugging Face files that it was imported with.

This module does not import torch, because a configuration is composed before torch is imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from rl_megatron import __version__
from rl_megatron.config.commands import format_command, format_override
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.hub import explain_download
from rl_megatron.config.model import ModelConfig

MANIFEST = "manifest.json"
FORMAT = 2  # increased when an earlier checkpoint would be read wrongly (docs/versions.md)
# Directory with the Hugging Face files except the weights, in an imported checkpoint or in a run that began with one.
HUGGING_FACE = "hugging_face"
_NAME_ONE = "; name the directory of a checkpoint, as in outputs/RUN/checkpoints/STAGE/step-000100"
_LISTED = 6  # checkpoints that a message lists
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # a tokenizer's directory has one of these


def check_format(path: Path, manifest: Mapping[str, Any]) -> None:
    """Check that the manifest `path` has the checkpoint format that this version reads."""
    saved = manifest.get("format")
    if saved == FORMAT:
        return
    number = "no number of the checkpoint format" if saved is None else f"the checkpoint format {saved}"
    writer = manifest.get("versions", {}).get("rl_megatron", "unknown")
    export, import_ = format_command("convert", "export"), format_command("convert", "import")
    raise ConfigError(
        f"{path} has {number} (written by rl_megatron {writer}), and rl_megatron {__version__} reads only format "
        f"{FORMAT}; continue with the version that wrote it, or export the weights with `{export}` of that version "
        f"and import them with `{import_}` of this one"
    )


ReadModel = Callable[[Path], ModelConfig]  # reads the model section of a directory with a config.json


def read_model_key(key: str, init_from: str | None, read: ReadModel | None = None) -> Any:
    """Return the value of `key` in the model section of the checkpoint `init_from`.

    `read` reads the model section of a Hugging Face directory, for commands that also accept such a directory.
    """
    if not init_from:
        raise ConfigError("model=init_from takes the model section of a checkpoint: add init_from=CHECKPOINT")
    return _read_model_section(Path(init_from), read)[key]


@lru_cache(maxsize=1)
def _read_model_section(checkpoint: Path, read: ReadModel | None) -> dict[str, Any]:
    path = checkpoint / MANIFEST
    if read is not None and not path.is_file() and (checkpoint / "config.json").is_file():
        return asdict(read(checkpoint))
    try:
        manifest = dict(json.loads(path.read_text("utf-8")))
    except FileNotFoundError as error:
        instead = describe_missing_checkpoint(checkpoint, lambda path: format_override("init_from", path))
        raise ConfigError(f"init_from={checkpoint} {instead}") from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"init_from={checkpoint}: {MANIFEST} cannot be read ({error})") from error
    check_format(path, manifest)
    section = manifest.get("model")
    if not isinstance(section, dict):
        raise ConfigError(f"init_from={checkpoint}: {MANIFEST} has no model section")
    defaults = asdict(ModelConfig())
    unknown = sorted(section.keys() - defaults.keys())
    if unknown:
        raise ConfigError(f"init_from={checkpoint}: {MANIFEST} has the unknown key model.{unknown[0]}")
    return defaults | section  # keys that are newer than the checkpoint have their defaults


def describe_missing_checkpoint(path: Path, as_written: Callable[[str], str] = str) -> str:
    """Return the end of a message about a path without a manifest: what the path is, and what to write instead.

    `as_written` turns a checkpoint's path into what the user should write.
    """
    if not path.exists():
        return f"does not exist{explain_download(path, as_written) or _NAME_ONE}"
    if (path / "config.json").is_file():
        converted = f"checkpoints/{path.resolve().name}"
        conversion = format_command("convert", "import", str(path), converted)
        return (
            f"is a Hugging Face directory; make a checkpoint of it with {conversion}, and write {as_written(converted)}"
        )
    stages = (path, *path.glob("checkpoints/*"))
    checkpoints = [manifest.parent for stage in stages for manifest in stage.glob(f"step-*/{MANIFEST}")]
    if not checkpoints:
        return f"has no {MANIFEST}: it is incomplete, or not a checkpoint directory"
    checkpoints.sort(key=lambda checkpoint: (checkpoint / MANIFEST).stat().st_mtime)
    listed = ", ".join(str(checkpoint.relative_to(path)) for checkpoint in checkpoints[-_LISTED:])
    return f"is not a checkpoint, but has the checkpoints {listed}; write {as_written(str(checkpoints[-1]))}"


def find_hugging_face_files(checkpoint: Path) -> Path | None:
    """Return the directory of Hugging Face files in a checkpoint, or in the run that wrote it.

    The directory has every file of the imported model except the weights. Return None if the model did not come from
    Hugging Face.
    """
    return _find_directory(checkpoint, HUGGING_FACE, "config.json")


def find_imported_tokenizer(checkpoint: Path) -> Path | None:
    """Return the Hugging Face directory of a checkpoint or its run that has a tokenizer; None if neither has one."""
    return _first_tokenizer(checkpoint, HUGGING_FACE)


def find_run_tokenizer(checkpoint: Path) -> Path | None:
    """Return the directory of the tokenizer in the run that wrote the checkpoint; None if the run has none."""
    return _first_tokenizer(checkpoint, "tokenizer")


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory has the files of a tokenizer."""
    return any((directory / name).is_file() for name in _TOKENIZERS)


def _first_tokenizer(checkpoint: Path, directory: str) -> Path | None:
    candidates = (_find_directory(checkpoint, directory, name) for name in _TOKENIZERS)
    return next((path for path in candidates if path is not None), None)


def _find_directory(checkpoint: Path, directory: str, file: str) -> Path | None:
    """Return `directory` in the checkpoint, or in the run that wrote it, if it has `file`; otherwise None."""
    checkpoint = checkpoint.absolute()
    homes = [checkpoint]
    if len(checkpoint.parents) > 2 and checkpoint.parents[1].name == "checkpoints":  # RUN/checkpoints/STAGE/step-N
        homes.append(checkpoint.parents[2])
    return next((home / directory for home in homes if (home / directory / file).is_file()), None)

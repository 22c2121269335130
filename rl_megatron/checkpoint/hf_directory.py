"""The files of a Hugging Face directory, and the checks before a conversion. This module does not need torch.

A mistake in the paths of a conversion is therefore reported at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_megatron.checkpoint.directory import check_head, list_adapter_sections, read_manifest
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.config.hub import explain_download
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.peft import DEFAULT_ADAPTER, TRAINER_DIRECTORY, plain_name
from rl_megatron.model.families import read_model
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.score import describe_decoder

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAX_SHARD_BYTES = 5 * 10**9  # the default size of an export's files


def check_import(source: Path, checkpoint: Path, base: Path | None = None) -> None:
    """Check the paths of an import: `source` has a model and its weights, and `checkpoint` does not exist.

    If `source` has adapters instead, `base` must be the checkpoint of their base.
    """
    is_adapter = bool(find_adapter_directories(source))
    if is_adapter and base is None:
        raise ConfigError(
            f"{source} holds an adapter, but not its base; name the checkpoint of the base with --base CHECKPOINT"
        )
    if base is not None:
        if not is_adapter:
            raise ConfigError(
                f"--base is for adapters, but neither {source} nor a subdirectory has an {ADAPTER_CONFIG}; omit --base"
            )
        manifest = read_manifest(base)
        check_head(base, manifest, "lm", weights_only=False)
        if "peft" in manifest:
            raise ConfigError(f"--base {base} holds an adapter itself; name the checkpoint of a whole model")
        refuse_existing(checkpoint)
        return
    read_directory(source)
    find_weight_files(source)
    refuse_existing(checkpoint)


def find_adapter_directories(source: Path) -> dict[str, Path]:
    """Return the directory of each adapter of a peft directory by adapter name, "default" first.

    The result is empty for the directory of a whole model. It leaves out hidden subdirectories and those named
    checkpoint-N, in which the Trainer of transformers keeps earlier steps.
    """
    directories = {DEFAULT_ADAPTER: source} if (source / ADAPTER_CONFIG).is_file() else {}
    if not directories and (source / "config.json").is_file():
        return {}
    for file in sorted(source.glob(f"*/{ADAPTER_CONFIG}")):
        name = file.parent.name
        if name.startswith(".") or TRAINER_DIRECTORY.fullmatch(name) is not None:
            continue
        try:
            plain_name(name)
        except ValueError as error:
            raise ConfigError(f"{file.parent}: the name of an adapter {error}; rename the directory") from error
        if name in directories:
            raise ConfigError(
                f"{source} has an {ADAPTER_CONFIG} and a subdirectory {name} with another one, and {name} is the name "
                "of both adapters; rename the subdirectory"
            )
        directories[name] = file.parent
    return directories


def choose_adapters(checkpoint: Path, manifest: Mapping[str, object], adapter: str | None) -> dict[str, str]:
    """Return the names of the adapters that an export writes, each with its name in the export.

    If `adapter` is given, only this one is written, directly into the export's directory. If it is None, all are
    written.
    """
    names = [section.get("adapter_name", DEFAULT_ADAPTER) for section in list_adapter_sections(manifest)]
    if adapter is None:
        return {name: name for name in names}
    if adapter not in names:
        raise ConfigError(f"--adapter {adapter}: checkpoint {checkpoint} has no such adapter{nearest(adapter, names)}")
    return {adapter: DEFAULT_ADAPTER}


def check_export(checkpoint: Path, target: Path, adapter: str | None = None) -> bool:
    """Check the paths and the adapter of an export, and return whether the checkpoint holds adapters."""
    manifest = read_manifest(checkpoint)
    refuse_adapter_with_head(checkpoint, manifest)
    refuse_existing(target)
    if adapter is not None and "peft" not in manifest:
        raise ConfigError(f"--adapter is for adapters, but checkpoint {checkpoint} holds a whole model; omit --adapter")
    choose_adapters(checkpoint, manifest, adapter)
    return "peft" in manifest


def refuse_adapter_with_head(checkpoint: Path, manifest: Mapping[str, object]) -> None:
    """Refuse to export an adapter that was trained with a score head."""
    if "peft" in manifest and manifest.get("head", "lm") != "lm":
        raise ConfigError(
            f"checkpoint {checkpoint} holds an adapter with a score head, and only adapters of language models can be "
            "exported; load it with rl_megatron"
        )


def refuse_existing(path: Path) -> None:
    """Refuse to write to a path that exists, or that cannot be created."""
    if path.exists():
        raise ConfigError(f"{path} exists already; choose another directory, or delete it")
    above = next(parent for parent in path.absolute().parents if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"{path} cannot be made, because {above} is a file; choose another directory")
    if not os.access(above, os.W_OK):
        raise ConfigError(f"{path} cannot be made, because {above} may not be written to; choose another directory")


def read_directory(directory: Path, head: str = "lm") -> tuple[Family, ModelConfig]:
    """Return the family and the model section that a directory's config.json describes.

    If `head` is "score", the directory must have a reward model, which is a classifier with one label.
    """
    config_file = directory / "config.json"
    config = read_json(config_file)
    return read_model(describe_decoder(config, str(config_file)) if head == "score" else config, str(config_file))


def find_weight_files(directory: Path) -> dict[str, set[str] | None]:
    """Return the weight files of a directory, each with the names of the tensors that the index places in it.

    In a directory without an index, the value of the only file is None.
    """
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file() and single.is_file():
        raise ConfigError(f"{directory} has both {INDEX} and {SINGLE}, and only one may hold the weights; remove one")
    if single.is_file():
        return {SINGLE: None}
    if not index.is_file():
        raise ConfigError(
            f"{directory} has neither {SINGLE} nor {INDEX}; weights are read in the safetensors format only"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index} has no weight_map, which states the file of each tensor")
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise ConfigError(f"{index} names a file in another directory, {file}; its files must be beside it")
        if not (directory / file).is_file():
            raise ConfigError(f"{directory / file} is missing, although {INDEX} names it; download it again")
    return {
        file: {name for name, its_file in weight_map.items() if its_file == file}
        for file in sorted(set(weight_map.values()))
    }


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a Hugging Face directory."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        download = explain_download(path.parent)
        raise ConfigError(f"{path} is missing; give a Hugging Face directory{download}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return values

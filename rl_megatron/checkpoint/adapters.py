"""What the manifests of checkpoints that hold adapters alone say: the sections of the adapters, and their base."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rl_megatron.checkpoint.directory import adapter_sections, read_manifest
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.sharded_model import Base, ShardedModel

_TENSORS = ".distcp"  # the ending of the files that hold a checkpoint's tensors


def base_of(checkpoint: Path) -> Base:
    """Return the base that the checkpoint of a whole model is. Its digest is that of its files of tensors.

    Raises:
        ConfigError: It is not a checkpoint, or a file is missing.
    """
    entries = read_manifest(checkpoint)["files"]
    digested = {name: entry for name, entry in entries.items() if name.endswith(_TENSORS)}
    digest = hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).hexdigest()[:16]
    return Base(str(checkpoint.resolve()), digest)


def adapter_entries(model: ShardedModel) -> dict[str, Any]:
    """Return the manifest's entries of a model's adapters and their base; empty if it has none."""
    if model.lora is None:
        return {}
    return entries_of([model.lora, *model.frozen_adapters], model.base)


def entries_of(adapters: Sequence[LoraConfig], base: Base | None) -> dict[str, Any]:
    """Return the manifest's entries of adapters, of which the first is the one that is trained, and of their base."""
    trained, *frozen = map(asdict, adapters)
    of_base = {} if base is None else asdict(base)
    return {"peft": trained, **({"frozen_adapters": frozen} if frozen else {}), "base": of_base}


def holds_adapter(manifest: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint holds adapters alone."""
    return "peft" in manifest


def saved_adapters(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[str, LoraConfig]:
    """Return the sections `peft` of a checkpoint's adapters by name, with the one that was trained last first.

    Raises:
        ConfigError: One has a key or value that this version does not know.
    """
    try:
        sections = TypeAdapter(tuple[LoraConfig, ...]).validate_python(adapter_sections(manifest))
    except ValidationError as error:
        raise ConfigError(f"checkpoint {checkpoint}: its manifest's peft section is not valid: {error}") from error
    return {section.adapter_name: section for section in sections}


def saved_base(checkpoint: Path, manifest: Mapping[str, Any]) -> Path:
    """Return the path of the checkpoint that an adapter was trained on, after checking that it is the same one.

    Raises:
        ConfigError: There is no checkpoint at the recorded path, or it has another digest.
    """
    recorded = manifest["base"]
    if not recorded:
        raise ConfigError(
            f"checkpoint {checkpoint} holds an adapter alone, and its base was never saved; load the base first"
        )
    try:
        found = base_of(Path(recorded["path"]))
    except ConfigError as error:
        raise ConfigError(
            f"checkpoint {checkpoint} holds an adapter alone, and its base cannot be read: {error}"
        ) from error
    check_base(checkpoint, manifest, found)
    return Path(recorded["path"])


def check_base(checkpoint: Path, manifest: Mapping[str, Any], base: Base | None) -> None:
    """Refuse an adapter that was trained on another base than a saved one.

    Raises:
        ConfigError: The digests differ, or the adapter's base was never saved. The message has what is known of both.
    """
    recorded = manifest["base"]
    if base is None:
        return
    if not recorded:
        raise ConfigError(
            f"checkpoint {checkpoint} holds an adapter of a base that was never saved, and the base here is "
            f"{base.path}; an adapter fits only the base that it was trained on"
        )
    if recorded["digest"] != base.digest:
        raise ConfigError(
            f"checkpoint {checkpoint} holds an adapter of {recorded['path']} with the digest {recorded['digest']}; the "
            f"base here, {base.path}, has {base.digest}; an adapter fits only the base that it was trained on"
        )


def check_frozen_adapters(checkpoint: Path, saved: Sequence[LoraConfig], model: ShardedModel) -> None:
    """Refuse a checkpoint for a model that has got other frozen adapters from another one.

    Args:
        checkpoint: The checkpoint.
        saved: The adapters that it holds beside the one that the model trains.
        model: The model.

    Raises:
        ConfigError: The model has frozen adapters, and they are not those of the checkpoint.
    """
    if model.frozen_adapters and set(model.frozen_adapters) != set(saved):
        listed = " and ".join(
            ", ".join(sorted(each.adapter_name for each in adapters)) or "none"
            for adapters in (model.frozen_adapters, saved)
        )
        raise ConfigError(
            f"checkpoint {checkpoint} holds other frozen adapters than the policy has from an earlier one: {listed}; "
            "load it into a new policy"
        )


def check_same_adapter(checkpoint: Path, saved: LoraConfig, lora: LoraConfig) -> None:
    """Refuse an adapter whose shape or scale is not that of the section `peft`.

    Args:
        checkpoint: The checkpoint.
        saved: The section of its adapter with the same name.
        lora: The section `peft`.

    Raises:
        ConfigError: A key differs.
    """
    saved_keys, now = asdict(saved), asdict(lora)
    free = {"lora_dropout", "init_lora_weights"}
    differing = [key for key in now if key not in free and _plain(saved_keys[key]) != _plain(now[key])]
    if differing:
        listed = ", ".join(f"peft.{key}: checkpoint {saved_keys[key]}, run {now[key]}" for key in differing)
        raise ConfigError(
            f"checkpoint {checkpoint} holds another adapter named {lora.adapter_name} ({listed}); give these keys the "
            "checkpoint's values, give the new adapter another name with peft.adapter_name, or export merged weights "
            "and start from those"
        )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, list | tuple) else value

"""Weights of training runs on disk: a directory that peft loads, with the optimizer's state if training can continue.

The tensors in it are whole, so they can be read in any layout.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron.checkpoint.directory import REPLACED, check_digests, publish, read_manifest_alone
from rl_megatron.checkpoint.hf_directory import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rl_megatron.checkpoint.peft_format import PEFT_PREFIX, build_peft_config
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.lora.targets import find_adapted_linears
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.adapter_runs import AdapterRun, AdapterSlot, SavedAdapter

OPTIMIZER = "optimizer.safetensors"
DELETED = "deleted"
"""The file that marks saved weights which a client has deleted. They are removed when no operation can need them."""
_STATES = ("exp_avg", "exp_avg_sq")


def save_run(
    run: AdapterRun, path: Path, manifest: Mapping[str, object], with_optimizer: bool, base: str | None
) -> None:
    """Write a run's weights to the directory `path`, all or nothing. Collective.

    Args:
        run: The run.
        path: The directory, which must not exist.
        manifest: JSON values that the manifest will have.
        with_optimizer: Whether the masters and the optimizer's state are written too.
        base: The Hugging Face directory of the base model, for peft; None if there is none.

    Raises:
        ConfigError: On every rank, if the files cannot be written. Nothing is left then.
    """
    ranks, groups = run.slot.topology.ranks, {"": run.weights}
    if with_optimizer:
        groups |= {f"{name}.": run.moments(name) for name in _STATES}
        groups |= {"master.": run.masters} if run.has_masters else {}
    whole = {prefix: _gather_whole(run, tensors, ranks) for prefix, tensors in groups.items()}
    failure = ranks.try_on_rank0(lambda: _write(run, path, whole, manifest, base))
    if failure is not None:
        raise ConfigError(f"the weights cannot be written: {failure}")


def _write(
    run: AdapterRun, path: Path, whole: dict[str, dict[str, Tensor]], manifest: Mapping[str, object], base: str | None
) -> None:
    """Write the directory of saved weights, all or nothing; `whole` has the tensors by the prefix of their kind."""
    partial = path.with_name(f".{path.name}.incomplete")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        weights = {f"{PEFT_PREFIX}{key}": tensor for key, tensor in whole.pop("").items()}
        save_file(weights, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        model = run.slot.model
        linears = find_adapted_linears(run.slot.config, model.config, model.config.vocab_size or model.vocab_size)
        config = build_peft_config(run.slot.config, linears, base)
        (partial / ADAPTER_CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        if whole:
            states = {f"{prefix}{key}": tensor for prefix, part in whole.items() for key, tensor in part.items()}
            save_file(states, partial / OPTIMIZER)
        facts = {"peft": asdict(run.slot.config), "optimizer_steps": run.num_steps, "has_masters": run.has_masters}
        publish(partial, path, {**manifest, **facts})
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def load_run(run: AdapterRun, path: Path, with_optimizer: bool) -> None:
    """Read weights into a run, and drop its gradients. Without the optimizer, its moments are 0. Collective.

    Every rank reads its own parts.

    Raises:
        ConfigError: On every rank, if files are missing or damaged. The run is unchanged.
    """
    ranks = run.slot.topology.ranks
    manifest = ranks.all_or_none(lambda: read_manifest_alone(path))
    ranks.all_or_none(lambda: check_digests(path, manifest, ranks.rank, ranks.size))
    if read_settings(manifest) != run.slot.config:
        raise ConfigError(f"{path.name} has another rank or other targets than the training run; make a run of its own")
    if with_optimizer and OPTIMIZER not in manifest["files"]:
        raise ConfigError(f"{path.name} was saved for sampling, without the optimizer's state; load it without")
    slot = run.slot
    weights = _read_parts(slot, path / ADAPTER_WEIGHTS, PEFT_PREFIX)
    masters = manifest["has_masters"] and OPTIMIZER in manifest["files"]
    run.set_weights(weights, _read_parts(slot, path / OPTIMIZER, "master.") if masters else None)
    moments = [_read_parts(slot, path / OPTIMIZER, f"{name}.") for name in _STATES] if with_optimizer else None
    run.set_moments(moments, int(manifest["optimizer_steps"]) if with_optimizer else 0)


def load_saved(slot: AdapterSlot, path: Path) -> SavedAdapter:
    """Return saved weights for sampling. Collective; the errors are those of `load_run`."""
    ranks = slot.topology.ranks
    manifest = ranks.all_or_none(lambda: read_manifest_alone(path))
    ranks.all_or_none(lambda: check_digests(path, manifest, ranks.rank, ranks.size))
    parts = _read_parts(slot, path / ADAPTER_WEIGHTS, PEFT_PREFIX)
    return SavedAdapter(slot, [part.to(dtype) for part, dtype in zip(parts, slot.dtypes, strict=True)])


def _gather_whole(run: AdapterRun, tensors: list[Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return whole tensors by the names of peft, on rank 0, and none on other ranks. Collective."""
    parts = [
        (entry.key, tuple(entry.global_shape), tuple(entry.global_offset), tensor.detach().cpu())
        for entry, tensor in zip(run.slot.entries, tensors, strict=True)
        if not np.any(entry.replica_id)  # one of the ranks that hold the same part
    ]
    whole: dict[str, Tensor] = {}
    everywhere = ranks.gather(
        [(*part[:3], part[3].numpy() if part[3].dtype is torch.float32 else part[3]) for part in parts]
    )
    if not ranks.leads:
        return whole
    for key, shape, offset, values in (part for rank_parts in everywhere for part in rank_parts):
        tensor = torch.as_tensor(values)
        target = whole.setdefault(key, torch.empty(shape, dtype=tensor.dtype))
        target[tuple(slice(start, start + size) for start, size in zip(offset, tensor.shape, strict=True))] = tensor
    return whole


def _read_parts(slot: AdapterSlot, path: Path, prefix: str) -> list[Tensor]:
    """Return this rank's part of every tensor of a file, on the run's device."""
    parts = []
    with safe_open(path, "pt") as file:
        for entry in slot.entries:
            tensor = file.get_slice(f"{prefix}{entry.key}")
            part = tuple(
                slice(start, start + size) for start, size in zip(entry.global_offset, entry.local_shape, strict=True)
            )
            parts.append(tensor[part].to(slot.topology.device))
    return parts


def read_saved(path: Path) -> dict[str, Any]:
    """Return the manifest of saved weights. ConfigError is raised if there are none."""
    return read_manifest_alone(path)


def read_settings(manifest: Mapping[str, Any]) -> LoraConfig:
    """Return the section `peft` of the run whose weights were saved."""
    return TypeAdapter(LoraConfig).validate_python(manifest["peft"])


def is_gone(directory: Path, manifest: Mapping[str, Any]) -> bool:
    """Return whether saved weights were deleted by their client, or have expired."""
    return (directory / DELETED).exists() or (manifest["expires"] is not None and manifest["expires"] < time.time())


def remove_gone(saved: Path) -> None:
    """Remove the files of saved weights that were deleted or have expired."""
    for directory in list_saved(saved, "*/*/*"):
        if is_gone(directory, read_saved(directory)):
            hidden = directory.with_name(f".{directory.name}.removed")
            shutil.rmtree(hidden, ignore_errors=True)
            directory.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def list_saved(saved: Path, pattern: str) -> Iterator[Path]:
    """Yield the directories of saved weights whose manifest can be read."""
    for directory in saved.glob(pattern):
        if directory.name.startswith(".") or directory.name.endswith(REPLACED):
            continue
        try:
            read_saved(directory)
        except ConfigError:
            continue
        yield directory

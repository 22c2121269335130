"""Descriptions of checkpoints from their manifests and tensor indexes, without loading weights or megatron-core.

A mistake in a path is therefore reported before torch is imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.checkpoint.directory import (
    CONFIG,
    Damaged,
    check_digests,
    find_checkpoints,
    read_manifest,
)
from rl_megatron.checkpoint.metadata import read_metadata
from rl_megatron.checkpoint.retention import find_best_checkpoint, read_eval_metric
from rl_megatron.config.checkpoint_metadata import MANIFEST
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.metrics import is_eval_metric

_OPTIMIZER = "optimizer."  # the prefix of the names of an optimizer's states


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor of a checkpoint, regardless of how it is split over files."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."
    num_bytes: int

    @property
    def is_parameter(self) -> bool:
        """Return whether the tensor belongs to the model and not to the optimizer."""
        return not self.name.startswith(_OPTIMIZER)


def list_tensors(path: Path) -> list[TensorEntry]:
    """Return the checkpoint's tensors, parameters first, each kind sorted by name."""
    # This import takes seconds, and listing checkpoints does not need it.
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    index = read_metadata(path).state_dict_metadata
    tensors = []
    for name, entry in index.items():
        if isinstance(entry, TensorStorageMetadata):
            shape, dtype = tuple(entry.size), entry.properties.dtype
            size = math.prod(shape) * dtype.itemsize
            tensors.append(TensorEntry(name, shape, str(dtype).removeprefix("torch."), size))
    return sorted(tensors, key=lambda tensor: (not tensor.is_parameter, tensor.name))


def describe(path: Path, verify: bool = True) -> dict[str, Any]:
    """Return everything that `rl-megatron inspect` shows of a checkpoint, as values that JSON can express.

    `verify` reads every file and compares it with its digest.
    """
    manifest = read_manifest(path)
    if verify:
        check_digests(path, manifest)
    tensors = list_tensors(path)
    parameters = [tensor for tensor in tensors if tensor.is_parameter]
    states = [tensor for tensor in tensors if not tensor.is_parameter]
    config, state = path / CONFIG, "verified" if verify else "not read"
    return {
        "path": str(path),
        **{key: value for key, value in manifest.items() if key not in ("files", "sha256")},
        "num_parameters": sum(math.prod(tensor.shape) for tensor in parameters),
        "parameter_bytes": sum(tensor.num_bytes for tensor in parameters),
        "optimizer_state": sorted({_name_state(tensor.name) for tensor in states}),
        "optimizer_bytes": sum(tensor.num_bytes for tensor in states),
        "tensors": [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype} for t in tensors],
        "files": {name: entry | {"state": state} for name, entry in manifest["files"].items()},
        "config": config.read_text() if config.is_file() else None,
    }


def _name_state(name: str) -> str:
    """Return "exp_avg" for "optimizer.exp_avg.decoder…"."""
    return name.removeprefix(_OPTIMIZER).partition(".")[0]


def list_checkpoints(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the checkpoints in a stage's directory or in a run's output_dir, by stage, oldest first.

    File sizes are checked, but the files are not read.
    """
    stages = {directory.name: directory for directory in sorted((path / "checkpoints").glob("*")) if directory.is_dir()}
    described = {name: _describe_checkpoints(directory) for name, directory in (stages or {path.name: path}).items()}
    described = {name: entries for name, entries in described.items() if entries}
    if not described:
        raise ConfigError(
            f"{path} is not a checkpoint (it has no {MANIFEST}) and contains none; give a checkpoint "
            "directory (step-…), the directory of a stage's checkpoints, or a run's output_dir"
        )
    return described


def _describe_checkpoints(directory: Path) -> list[dict[str, Any]]:
    saved = find_checkpoints(directory)
    entries = []
    for path in saved:
        try:
            manifest = read_manifest(path)
        except (Damaged, ConfigError) as error:
            entries.append({"path": str(path), "damaged": str(error)})
            continue
        names = filter(is_eval_metric, manifest.get("results", {}).get("measures", {}))
        metrics = {name: value for name in names if (value := read_eval_metric(manifest, name)) is not None}
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        entries.append({"path": str(path), "step": manifest["step"], "bytes": size, "measures": metrics})
    measured = {name for entry in entries for name in entry.get("measures", ())}
    best_by = {name: find_best_checkpoint(saved, name) for name in measured}
    for entry, path in zip(entries, saved, strict=True):
        entry["newest"] = path == saved[-1]
        entry["best"] = sorted(name for name, best in best_by.items() if best == path)
    return entries

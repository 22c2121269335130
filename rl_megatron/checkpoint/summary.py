"""What a checkpoint holds, read off its manifest and its index of tensors: no weights, no GPU, no megatron-core."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.checkpoint import directory as checkpoint
from rl_megatron.checkpoint.retention import best_checkpoint, measured
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.eval_metrics import HIGHER_IS_BETTER

_OPTIMIZER = "optimizer."  # what the names of an optimizer's states begin with


@dataclass(frozen=True)
class TensorEntry:
    """A whole tensor, however it is cut into files."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch names it, without "torch."
    num_bytes: int

    @property
    def is_parameter(self) -> bool:
        return not self.name.startswith(_OPTIMIZER)


def tensors(path: Path) -> list[TensorEntry]:
    """The checkpoint's tensors, parameters first, by name.

    Raises: Damaged where the index cannot be read.
    """
    from torch.distributed.checkpoint import FileSystemReader  # seconds, which a list of checkpoints does not need
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        index = FileSystemReader(path).read_metadata().state_dict_metadata
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError) as error:
        raise checkpoint.Damaged(f"checkpoint {path} is damaged: .metadata cannot be read ({error!r})") from error
    found = []
    for name, entry in index.items():
        if isinstance(entry, TensorStorageMetadata):
            shape, dtype = tuple(entry.size), entry.properties.dtype
            size = math.prod(shape) * dtype.itemsize
            found.append(TensorEntry(name, shape, str(dtype).removeprefix("torch."), size))
    return sorted(found, key=lambda tensor: (not tensor.is_parameter, tensor.name))


def describe(path: Path, verify: bool = True) -> dict[str, Any]:
    """Everything that `inspect` tells of a checkpoint, as JSON has it. With `verify` every byte is read.

    Raises: ConfigError where there is no checkpoint, or it is damaged, naming the file.
    """
    manifest = checkpoint.read_manifest(path)
    if verify:
        checkpoint.check_digests(path, manifest)
    found = tensors(path)
    parameters = [tensor for tensor in found if tensor.is_parameter]
    states = [tensor for tensor in found if not tensor.is_parameter]
    config = path / checkpoint.CONFIG
    return {
        "path": str(path),
        **{key: value for key, value in manifest.items() if key not in ("files", "sha256")},
        "num_parameters": sum(math.prod(tensor.shape) for tensor in parameters),
        "parameter_bytes": sum(tensor.num_bytes for tensor in parameters),
        "optimizer_state": sorted({_state_of(tensor.name) for tensor in states}),
        "optimizer_bytes": sum(tensor.num_bytes for tensor in states),
        "tensors": [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype} for t in found],
        "files": {name: _file(entry, verify) for name, entry in manifest["files"].items()},
        "config": config.read_text() if config.is_file() else None,
    }


def _state_of(name: str) -> str:
    """optimizer.exp_avg.decoder… → exp_avg; megatron-core's own optimizers say optimizer.state.exp_avg.decoder…"""
    return name.removeprefix(_OPTIMIZER).removeprefix("state.").partition(".")[0]


def _file(entry: dict[str, Any] | int, verified: bool) -> dict[str, Any]:
    digest = None if isinstance(entry, int) else entry["sha256"]
    state = "no digest" if digest is None else "verified" if verified else "not read"
    return {"bytes": checkpoint.size_of(entry), "sha256": digest, "state": state}


def list_checkpoints(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The checkpoints in a stage's directory or a run's output_dir, by stage, oldest first; sizes are looked at, and
    no contents.

    Raises: ConfigError where there are none.
    """
    stages = {directory.name: directory for directory in sorted((path / "checkpoints").glob("*")) if directory.is_dir()}
    found = {name: rows for name, directory in (stages or {path.name: path}).items() if (rows := _rows(directory))}
    if not found:
        raise ConfigError(
            f"{path} is no checkpoint (it has no {checkpoint.MANIFEST}), and there is none in it; give a checkpoint "
            "directory (step-…), the directory of a stage's checkpoints, or a run's output_dir"
        )
    return found


def _rows(directory: Path) -> list[dict[str, Any]]:
    saved = checkpoint.complete_checkpoints(directory)
    rows = []
    for path in saved:
        try:
            manifest = checkpoint.read_manifest(path)
        except checkpoint.Damaged as error:
            rows.append({"path": str(path), "damaged": str(error)})
            continue
        measures = {name: value for name in HIGHER_IS_BETTER if (value := measured(manifest, name)) is not None}
        size = sum(map(checkpoint.size_of, manifest["files"].values()))
        rows.append({"path": str(path), "step": manifest["step"], "bytes": size, "measures": measures})
    best_by = {
        name: best_checkpoint(saved, name) for name in {name for row in rows for name in row.get("measures", ())}
    }
    for row, path in zip(rows, saved, strict=True):
        row["newest"] = path == saved[-1]
        row["best"] = sorted(name for name, best in best_by.items() if best == path)
    return rows

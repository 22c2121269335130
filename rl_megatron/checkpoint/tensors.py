"""Writing and reading the tensors of a checkpoint part by part in one process, for the Hugging Face converter.

megatron-core saves and loads through torch's distributed checkpoint. Its files hold parts of tensors one after the
other, each in `torch.save`'s format, and `.metadata` states each part's tensor and position. A tensor may be stored in
any number of parts, whatever layout it is loaded under. Torch's writer keeps every tensor in memory until its file is
closed, and here that would be the whole model. This module therefore writes the file itself, and uses torch's writer
only for the metadata.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from rl_megatron.checkpoint.metadata import read_metadata

_FILE = "__0_0.distcp"
_OPTIMIZER_PREFIX = "optimizer."


class TensorWriter:
    """A writer of a checkpoint's tensors, in parts of any size and order. It owns the file that holds them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file = (directory / _FILE).open("wb")
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._written: list[WriteResult] = []

    def write(self, name: str, global_shape: tuple[int, ...], offset: tuple[int, ...], part: Tensor) -> None:
        """Write one part of a tensor. The part is contiguous and has as many dimensions as the tensor.

        `offset` is the index of the part's first element in the whole tensor, whose shape is `global_shape`.
        """
        if name not in self._tensors:
            properties = TensorProperties(dtype=part.dtype)
            self._tensors[name] = TensorStorageMetadata(properties, torch.Size(global_shape), [])
        stored, start = self._tensors[name].chunks, self._file.tell()
        torch.save(part, self._file)
        index = MetadataIndex(name, torch.Size(offset), len(stored))
        stored.append(ChunkStorageMetadata(torch.Size(offset), part.shape))
        length = self._file.tell() - start
        self._written.append(WriteResult(index, length, _StorageInfo(_FILE, start, length)))

    def finish(self) -> None:
        """Write the metadata, so that `dist_checkpointing` can load the directory."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        FileSystemWriter(self._directory).finish(Metadata(dict(self._tensors)), [self._written])
        torch.save({}, self._directory / "common.pt")  # the format requires a file for values that are not tensors
        save_config(CheckpointingConfig("torch_dist", 1), str(self._directory))

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Part:
    """A stored part of a tensor: its offset and shape in the tensor, and its file, first byte and number of bytes."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint and the parts in which it is stored."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def find_model_tensors(checkpoint: Path) -> dict[str, StoredTensor]:
    """Return the model's tensors in a checkpoint, without those of the optimizer."""
    metadata = read_metadata(checkpoint)
    tensors = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and not name.startswith(_OPTIMIZER_PREFIX):
            parts = []
            for piece in stored.chunks:
                at = metadata.storage_data[MetadataIndex(name, piece.offsets)]
                file = checkpoint / at.relative_path
                parts.append(Part(tuple(piece.offsets), tuple(piece.sizes), file, at.offset, at.length))
            tensors[name] = StoredTensor(stored.properties.dtype, tuple(stored.size), tuple(parts))
    return tensors


def read_parts(tensor: StoredTensor) -> Iterator[tuple[Part, Tensor]]:
    """Yield each part of a tensor with its values. Only one part is in memory at a time."""
    for part in tensor.parts:
        with part.file.open("rb", buffering=0) as file:
            view = _create_file_view(file, part.start, part.length)
            value = torch.load(view, map_location="cpu", weights_only=True)  # pyright: ignore[reportArgumentType]
            yield part, value

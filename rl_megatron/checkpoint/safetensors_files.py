"""Reading and writing safetensors files a few rows of a tensor at a time.

A file has three parts: the length of its header (8 bytes); a JSON header (name → dtype, shape, and the tensor's begin
and end in the third part); the tensors' bytes. The rows of a tensor are contiguous, so any of them can be read or
written alone, and memory use depends on the number of rows, not on the size of the file. The safetensors library maps
whole files instead, and mapped pages count as memory of the process.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_megatron.checkpoint.hf_directory import INDEX, SINGLE
from rl_megatron.config.errors import ConfigError
from rl_megatron.model.families.table import Shape, Slab

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class TensorLocation:
    """The place of a tensor: its file, the position of its first byte there, its dtype and its shape."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Return the size of one row in bytes; a row of a vector is one element."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class _Files:
    """File descriptors by path. A file is opened when it is first needed."""

    def __init__(self, flags: int) -> None:
        self._flags, self._descriptors = flags, {}

    def __getitem__(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, self._flags)
        return self._descriptors[path]

    def read(self, path: Path, position: int, into: Tensor) -> None:
        """Fill a contiguous tensor with the bytes of a file from `position` on."""
        unread = _view_bytes(into)
        while unread:
            count = os.preadv(self[path], [unread], position)
            if count == 0:
                raise OSError(f"{path} has no byte {position}: it was truncated after its header was read")
            unread, position = unread[count:], position + count

    def close(self, sync: bool = False) -> None:
        for descriptor in self._descriptors.values():
            if sync:
                os.fsync(descriptor)
            os.close(descriptor)
        self._descriptors = {}


class WeightReader:
    """A reader of rows of the tensors of a Hugging Face directory. It owns the open files."""

    def __init__(self, locations: Mapping[str, TensorLocation]) -> None:
        self.locations = dict(locations)
        self._files = _Files(os.O_RDONLY)
        self._slab: tuple[tuple[str, int], Tensor] | None = None

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read_rows(self, name: str, first: int, into: Tensor) -> None:
        """Fill `into` with the rows of tensor `name` from row `first` on.

        `into` [rows, …] is contiguous and of the tensor's dtype.
        """
        location = self.locations[name]
        self._files.read(location.file, location.start + first * location.row_bytes, into)

    def read_slab(self, name: str, index: int) -> Tensor:
        """Return slab `index` of tensor `name`: the part with this index in the first axis.

        The most recent slab is cached, because its parts are read one by one.
        """
        if self._slab is None or self._slab[0] != (name, index):
            location = self.locations[name]
            whole = torch.empty(1, *location.shape[1:], dtype=location.dtype)
            self.read_rows(name, index, whole)
            self._slab = (name, index), whole[0]
        return self._slab[1]


def _view_bytes(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).reshape(-1).numpy().data if tensor.numel() else memoryview(b"")


def read_header(path: Path) -> dict[str, TensorLocation]:
    """Return the place of each tensor in one safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise ConfigError(
                f"{path} is truncated, or is not a safetensors file: it has {size} bytes, and its header would have "
                f"{length}"
            )
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            locations = {name: _parse_location(path, name, 8 + length, entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} is not a safetensors file: its header cannot be read ({error})") from error
    end = 8 + length
    for name, location in sorted(locations.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if location.start != end:
            raise ConfigError(f"{path}: {name} begins at byte {location.start}, but the tensor before it ends at {end}")
        end += location.num_bytes
    if end != size:
        kind = "truncated" if size < end else "too long"
        raise ConfigError(f"{path} is {kind}: it has {size} bytes, and its header describes {end}; download it again")
    return locations


def _parse_location(path: Path, name: str, data: int, entry: Mapping[str, Any]) -> TensorLocation:
    if entry["dtype"] not in _DTYPES:
        raise ConfigError(
            f"{path}: {name} is {entry['dtype']}, which is not supported; supported dtypes: {', '.join(_DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    location = TensorLocation(path, data + begin, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    if end - begin != location.num_bytes:
        raise ConfigError(
            f"{path}: {name} of shape {location.shape} has {end - begin} bytes, and should have {location.num_bytes}"
        )
    return location


class WeightWriter:
    """A writer of a directory's safetensors files. Tensors may be written in any order and in parts of any size.

    It owns the open files. Headers are written first, so the files have their full length from the start. Tensors are
    distributed to files in the order of `shapes`; a tensor larger than `max_shard_bytes` has its own file.
    """

    def __init__(
        self,
        directory: Path,
        shapes: Mapping[str, Shape],
        dtype_of: Callable[[str], torch.dtype],
        max_shard_bytes: int,
    ) -> None:
        self._directory = directory
        self._files = _Files(os.O_RDWR)
        self._written = dict.fromkeys(shapes, 0)
        self.locations: dict[str, TensorLocation] = {}
        sizes = {name: math.prod(shape) * dtype_of(name).itemsize for name, shape in shapes.items()}
        shards = _split_into_shards(sizes, max_shard_bytes)
        for number, names in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            # The widest dtypes come first, so that every tensor is aligned to the size of its elements.
            names = sorted(names, key=lambda name: -dtype_of(name).itemsize)
            self.locations |= _begin_file(directory / file, {name: (dtype_of(name), shapes[name]) for name in names})

    def write(self, name: str, row: int, column: int, block: Tensor) -> None:
        """Write `block` at (row, column) of the tensor. The rows of a vector are its elements."""
        location, data = self.locations[name], block.contiguous()
        start = location.start + row * location.row_bytes
        if data.shape[1:] == location.shape[1:]:
            self._put(location.file, data, start)
        else:  # the block covers only some columns of each row
            for offset, part in enumerate(data):
                self._put(location.file, part, start + offset * location.row_bytes + column * location.dtype.itemsize)
        self._written[name] += data.nbytes

    def write_slab(self, name: str, slab: Slab, row: int, column: int, block: Tensor) -> None:
        """Write `block` at (row, column) of a slab of a tensor that stacks experts. Other values are unchanged."""
        location = self.locations[name]
        whole = torch.empty(1, *location.shape[1:], dtype=location.dtype)
        position = location.start + slab.expert * location.row_bytes
        self._files.read(location.file, position, whole)
        within = slab.rows(whole[0])[row : row + len(block)]
        (within if block.dim() == 1 else within[:, column : column + block.size(1)]).copy_(block)
        self._put(location.file, whole, position)
        self._written[name] += block.nbytes

    def _put(self, file: Path, data: Tensor, position: int) -> None:
        left = _view_bytes(data)
        while left:
            count = os.pwrite(self._files[file], left, position)
            left, position = left[count:], position + count

    def finish(self) -> None:
        """Sync and close the files and, if there are several, write their index.

        Every byte must have been written exactly once.
        """
        wrong = [name for name, count in self._written.items() if count != self.locations[name].num_bytes]
        if wrong:
            raise RuntimeError(f"{len(wrong)} tensors were not written exactly once, such as {wrong[0]}")
        self._files.close(sync=True)
        if len({location.file for location in self.locations.values()}) > 1:
            index = {
                "metadata": {"total_size": sum(location.num_bytes for location in self.locations.values())},
                "weight_map": {name: location.file.name for name, location in sorted(self.locations.items())},
            }
            (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def close(self) -> None:
        self._files.close()


def _split_into_shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    shards, remaining = [], -1
    for name, size in sizes.items():
        if size > remaining:
            shards.append([])
            remaining = most
        shards[-1].append(name)
        remaining -= size
    return shards


def _begin_file(path: Path, tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> dict[str, TensorLocation]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires that tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return read_header(path)

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
class Place:
    """The place of a tensor: its file, the position of its first byte there, its dtype and its shape."""

    file: Path
    start: int
    dtype: torch.dtype
    shape: Shape

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensor in bytes."""
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
        """Fill a contiguous tensor with the bytes of a file from `position` on.

        Raises:
            OSError: The file ends early, because it was truncated after its header was read.
        """
        unread = _bytes_of(into)
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

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = dict(places)
        self._files = _Files(os.O_RDONLY)
        self._slab: tuple[tuple[str, int], Tensor] | None = None

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read_rows(self, name: str, first: int, into: Tensor) -> None:
        """Fill `into` with the rows of tensor `name` from row `first` on.

        Args:
            name: The tensor's name.
            first: The first row to read.
            into: [rows, …], contiguous and of the tensor's dtype.

        Raises:
            OSError: The file ends early, because it was truncated after its header was read.
        """
        place = self.places[name]
        self._files.read(place.file, place.start + first * place.row_bytes, into)

    def slab(self, name: str, index: int) -> Tensor:
        """Return tensor `name` at `index` of its first axis. The last one is kept, because parts of it are needed."""
        if self._slab is None or self._slab[0] != (name, index):
            place = self.places[name]
            whole = torch.empty(1, *place.shape[1:], dtype=place.dtype)
            self.read_rows(name, index, whole)
            self._slab = (name, index), whole[0]
        return self._slab[1]


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).reshape(-1).numpy().data if tensor.numel() else memoryview(b"")


def read_header(path: Path) -> dict[str, Place]:
    """Return the place of each tensor in one safetensors file.

    Raises:
        ConfigError: The file is truncated or too long, or is not in the format.
    """
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
            places = {name: _place(path, name, 8 + length, entry) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} is not a safetensors file: its header cannot be read ({error})") from error
    end = 8 + length
    for name, place in sorted(places.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if place.start != end:
            raise ConfigError(f"{path}: {name} begins at byte {place.start}, but the tensor before it ends at {end}")
        end += place.num_bytes
    if end != size:
        kind = "truncated" if size < end else "too long"
        raise ConfigError(f"{path} is {kind}: it has {size} bytes, and its header describes {end}; download it again")
    return places


def _place(path: Path, name: str, data: int, entry: Mapping[str, Any]) -> Place:
    if entry["dtype"] not in _DTYPES:
        raise ConfigError(
            f"{path}: {name} is {entry['dtype']}, which is not supported; supported dtypes: {', '.join(_DTYPES)}"
        )
    begin, end = entry["data_offsets"]
    place = Place(path, data + begin, _DTYPES[entry["dtype"]], tuple(entry["shape"]))
    if end - begin != place.num_bytes:
        raise ConfigError(
            f"{path}: {name} of shape {place.shape} has {end - begin} bytes, and should have {place.num_bytes}"
        )
    return place


class WeightWriter:
    """A writer of a directory's safetensors files, whose tensors may come in any order and in parts of any size.

    It owns the open files. Headers are written first, so the files have their full length from the start.

    Args:
        directory: The directory to write into.
        shapes: The shapes of all tensors by name, in the order in which they are distributed to files.
        dtype_of: The dtype of a tensor, by name.
        max_shard_bytes: The most bytes of tensors in a file. A larger tensor has its own file.
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
        self.places: dict[str, Place] = {}
        sizes = {name: math.prod(shape) * dtype_of(name).itemsize for name, shape in shapes.items()}
        shards = _shards(sizes, max_shard_bytes)
        for number, names in enumerate(shards, start=1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            # The widest dtypes come first, so that every tensor is aligned to the size of its elements.
            names = sorted(names, key=lambda name: -dtype_of(name).itemsize)
            self.places |= _begin_file(directory / file, {name: (dtype_of(name), shapes[name]) for name in names})

    def write(self, name: str, row: int, column: int, block: Tensor) -> None:
        """Write `block` at (row, column) of the tensor. The rows of a vector are its elements."""
        place, data = self.places[name], block.contiguous()
        start = place.start + row * place.row_bytes
        if data.shape[1:] == place.shape[1:]:
            self._put(place.file, data, start)
        else:  # the block covers only some columns of each row
            for offset, part in enumerate(data):
                self._put(place.file, part, start + offset * place.row_bytes + column * place.dtype.itemsize)
        self._written[name] += data.nbytes

    def write_slab(self, name: str, slab: Slab, row: int, column: int, block: Tensor) -> None:
        """Write `block` at (row, column) of a part of a tensor that stacks experts, whose other parts stay."""
        place = self.places[name]
        whole = torch.empty(1, *place.shape[1:], dtype=place.dtype)
        position = place.start + slab.expert * place.row_bytes
        self._files.read(place.file, position, whole)
        within = slab.rows(whole[0])[row : row + len(block)]
        (within if block.dim() == 1 else within[:, column : column + block.size(1)]).copy_(block)
        self._put(place.file, whole, position)
        self._written[name] += block.nbytes

    def _put(self, file: Path, data: Tensor, position: int) -> None:
        left = _bytes_of(data)
        while left:
            count = os.pwrite(self._files[file], left, position)
            left, position = left[count:], position + count

    def finish(self) -> None:
        """Sync and close the files and, if there are several, write their index.

        Raises:
            RuntimeError: The bytes written of a tensor are not its size, so the files cannot be used.
        """
        wrong = [name for name, count in self._written.items() if count != self.places[name].num_bytes]
        if wrong:
            raise RuntimeError(f"{len(wrong)} tensors were not written exactly once, such as {wrong[0]}")
        self._files.close(sync=True)
        if len({place.file for place in self.places.values()}) > 1:
            index = {
                "metadata": {"total_size": sum(place.num_bytes for place in self.places.values())},
                "weight_map": {name: place.file.name for name, place in sorted(self.places.items())},
            }
            (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    shards, remaining = [], -1
    for name, size in sizes.items():
        if size > remaining:
            shards.append([])
            remaining = most
        shards[-1].append(name)
        remaining -= size
    return shards


def _begin_file(path: Path, tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> dict[str, Place]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks that tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return read_header(path)

"""`TensorStore`: keeps the tensors of a rank's sequences in host memory up to a limit, and in files beyond it."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from rl_megatron import disk


class TensorStore:
    """The storage of tensors: host memory up to a limit, and memory-mapped files beyond it.

    A file is unlinked once it is mapped, so its space is freed with the tensor, even if the process is killed. The
    directory is removed with the store.
    """

    def __init__(self, max_bytes: float | None = None, directory: str | None = None):
        """Start empty.

        Args:
            max_bytes: The maximum total size of the tensors in memory. None: no limit.
            directory: The parent of the files' directory. None: the system's directory for temporary files.
        """
        self._max_bytes, self._parent = max_bytes, directory
        self._in_memory = 0
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0

    @property
    def directory(self) -> Path | None:
        """Return the directory of the files, or None if no file was needed so far."""
        return None if self._directory is None else Path(self._directory.name)

    def full(self, shape: tuple[int, ...], fill: float, dtype: torch.dtype) -> Tensor:
        """Return a new tensor, filled with `fill`. Raises OSError if a file for it cannot be written."""
        size = torch.Size(shape).numel()
        num_bytes = size * dtype.itemsize
        if self._max_bytes is None or self._in_memory + num_bytes <= self._max_bytes:
            tensor = torch.full(shape, fill, dtype=dtype)
            if self._max_bytes is not None:
                self._in_memory += num_bytes
                weakref.finalize(tensor.untyped_storage(), self._free, num_bytes)
            return tensor
        return self._map_file(size, dtype).view(shape).fill_(fill)

    def keep(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if there is no limit, and otherwise a copy in memory or in a file."""
        if self._max_bytes is None:
            return tensor
        return self.full(tuple(tensor.shape), 0, tensor.dtype).copy_(tensor)

    def close(self) -> None:
        """Remove the directory. Tensors that are still in use stay valid."""
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _map_file(self, size: int, dtype: torch.dtype) -> Tensor:
        if self._directory is None:
            prefix = disk.make_temporary_prefix("sequences", Path(self._parent) if self._parent else None)
            self._directory = tempfile.TemporaryDirectory(prefix=prefix, dir=self._parent)
        self._number += 1
        path = Path(self._directory.name) / str(self._number)
        num_bytes = max(size, 1) * dtype.itemsize
        with path.open("wb") as file:
            try:
                if hasattr(os, "posix_fallocate"):  # without it, a full disk would kill the process at a later write
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise OSError(error.errno, f"{num_bytes:,} bytes of sequences: {error.strerror}", str(path)) from error
        mapped = torch.from_file(str(path), shared=True, size=max(size, 1), dtype=dtype)
        path.unlink()
        return mapped[:size]

    def _free(self, num_bytes: int) -> None:
        self._in_memory -= num_bytes

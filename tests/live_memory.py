"""The peak memory of the tensors that a block of code makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """A mode that records the memory of the tensors made within its block.

    Attributes:
        peak: The largest number of bytes that these tensors held at once.
    """

    def __init__(self, *before: torch.Tensor) -> None:
        """Initialize the mode; the memory of the tensors `before` does not count."""
        super().__init__()
        self.peak = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in before}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._known:
                    reference = StorageWeakRef(storage)
                    self._alive[reference.cdata] = (reference, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result

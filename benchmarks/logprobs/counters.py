"""Count the bytes moved, the peak of live memory and the collectives of a piece of code, operation by operation."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

CACHED_BYTES = 12 << 20  # a tensor that is not larger may stay in a CPU's last-level cache
# Operations that read no given tensor; in place, that do not read the old values; and that read only the part of the
# first tensor that they return.
_NOT_READ = ("empty", "new_", "zeros", "ones", "full", "arange", "scalar_tensor")
_WRITTEN_ONLY = {"copy_", "fill_", "zero_", "normal_", "uniform_"}
_PICK = {"gather", "index", "index_select", "embedding", "take_along_dim"}
_NO_COLLECTIVE = {"barrier", "monitored_barrier_"}
_SCATTER = {"scatter_", "scatter_add_", "scatter_add", "index_put_", "index_fill_", "index_add_"}


class Counters(TorchDispatchMode):
    """A context that counts what the operations within it do.

    Every operation reads its tensors once and writes its results once. Operations inside a Triton kernel or a compiled
    function are not seen, and neither is the scratch memory of an operator.

    Attributes:
        bytes_moved: Bytes that were read or written.
        memory_bytes: Of these, the bytes to and from storages larger than `CACHED_BYTES`.
        collectives: The number of collectives.
        peak: The most bytes alive at a time, of those allocated within the context.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes_moved = self.memory_bytes = self.collectives = self.live = self.peak = 0
        self._storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d":
            self.collectives += name not in _NO_COLLECTIVE
            return result
        given = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        returned = [x for x in tree_iter(result) if isinstance(x, Tensor)]
        for storage_bytes, moved in _moved(func, name, args, kwargs, given, returned):
            self.bytes_moved += moved
            self.memory_bytes += moved if storage_bytes > CACHED_BYTES else 0
        known = {x.untyped_storage()._cdata for x in given}
        for x in returned:
            if x.untyped_storage()._cdata not in known:
                self._follow(x.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def freed(_: Any) -> None:
            self.live -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def _moved(
    func: Any, name: str, args: tuple, kwargs: dict, given: list[Tensor], returned: list[Tensor]
) -> list[tuple[int, int]]:
    """Yield (size of the storage, bytes read or written) for every tensor of the operation."""
    mutated = _mutated(func, args, kwargs)
    if not mutated and returned and all(_is_view(x, given) for x in returned):
        return []
    if name.startswith("empty") or name == "new_empty":
        return []
    if name in _SCATTER:
        rows = given[0][0].numel() if name in ("index_fill_", "index_add_") and given[0].dim() > 1 else 1
        places = sum(x.numel() for x in given[1:] if not x.is_floating_point()) * rows
        return [_part(given[0], 2 * places * given[0].element_size()), *map(_all, given[1:])]
    if name in _PICK:
        picked = sum(_size(x) for x in returned)
        return [_part(given[0], picked), *map(_all, given[1:]), *map(_all, returned)]
    read = [] if name.startswith(_NOT_READ) else given
    if "out" in kwargs:
        read = [x for x in tree_iter(args) if isinstance(x, Tensor)]
    elif name in _WRITTEN_ONLY:
        read = given[1:]
    return [*map(_all, read), *map(_all, mutated or returned)]


def _mutated(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if position >= len(args) else args[position]
            found += [x for x in tree_iter(value) if isinstance(x, Tensor)]
    return found


def _is_view(x: Tensor, given: list[Tensor]) -> bool:
    return any(x.untyped_storage()._cdata == y.untyped_storage()._cdata for y in given)


def _size(x: Tensor) -> int:
    """Return the bytes of the distinct elements: an expanded element is read once."""
    size = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size


def _all(x: Tensor) -> tuple[int, int]:
    return _part(x, _size(x))


def _part(x: Tensor, moved: int) -> tuple[int, int]:
    return x.untyped_storage().nbytes(), moved

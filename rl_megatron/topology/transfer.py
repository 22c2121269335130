"""Move tensors between the host and the device with as few waits as possible.

A GPU computes while the host prepares the next work, as long as neither waits for the other. An ordinary copy to a GPU
waits, however small it is. So `send` copies everything that a step needs at once, from pinned memory, without waiting.
Reading always waits. `to_host` is the only function by which training and logprobs read from the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")

_ALIGNMENT = 64  # bytes; kernels load several numbers at once only if a tensor begins at a multiple of 16


def send(tree: Tree, device: torch.device) -> Tree:
    """Return a copy of `tree` with its tensors on `device`. They are sent in one transfer, and the host does not wait.

    A tensor that occurs twice is sent once. The sent tensors share one buffer, which is freed with the last of them.

    Args:
        tree: Nested dataclasses, mappings, lists and tuples. Everything in them that is not a tensor on the host stays
            as it is.
        device: The device.
    """
    if device.type == "cpu":
        return tree
    tensors: dict[int, Tensor] = {}
    _map_tensors(tree, lambda tensor: tensors.setdefault(id(tensor), tensor))
    on_host = [tensor for tensor in tensors.values() if tensor.device.type == "cpu"]
    sent = {id(old): new for old, new in zip(on_host, send_tensors(on_host, device), strict=True)}
    return _map_tensors(tree, lambda tensor: sent.get(id(tensor), tensor))


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor on the host, after waiting until the device has computed it."""
    return tensor.detach().cpu()


def read_numbers(tensor: Tensor) -> list[float]:
    """Return the numbers of a 1-d tensor, after waiting until the device has computed them."""
    return to_host(tensor).tolist()


def send_tensors(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return copies of host tensors on the device, which share one buffer. The host does not wait."""
    sizes = [-(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, view in zip(tensors, _views(buffer, tensors, starts), strict=True):
        view.copy_(tensor)
    # The allocator of pinned memory keeps the buffer until the copy has ended.
    return _views(buffer.to(device, non_blocking=True), tensors, starts)


def _views(buffer: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Return views of the buffer that begin at `starts` and have the shapes and dtypes of `like`.

    `.data` gives each view its own version counter. Otherwise autograd would count a write to one as a change of all.
    """
    return [
        buffer[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape).data
        for tensor, start in zip(like, starts, strict=False)  # the last start is the buffer's end
    ]


def _map_tensors(tree: object, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = _map_tensors(value, function)
        return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_tensors(value, function) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_map_tensors(value, function) for value in tree)
    if is_dataclass(tree) and not isinstance(tree, type):
        values = {field.name: getattr(tree, field.name) for field in fields(tree) if field.init}
        return replace(tree, **{name: _map_tensors(value, function) for name, value in values.items()})
    return tree

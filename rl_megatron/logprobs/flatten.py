"""Flatten logits of any leading shape to rows [N, V_local], without a copy if the strides allow a view."""

from __future__ import annotations

import math

import torch
from jaxtyping import Shaped
from torch import Tensor


def memory_order(logits: Shaped[Tensor, "*tokens columns"]) -> list[int]:
    """Return the leading dimensions by descending stride, so that a view can flatten them.

    For a tensor [S, B, V] that is transposed to [B, S, V], the result is [1, 0].
    """
    return sorted(range(logits.dim() - 1), key=lambda dim: -logits.stride(dim))


def to_rows(x: Shaped[Tensor, "*tokens columns"], order: list[int]) -> Shaped[Tensor, "rows columns"]:
    """Return [..., C] as [N, C] with the leading dimensions in `order`. It is a view if the strides allow one."""
    return x.permute(*order, -1).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def from_rows(x: Shaped[Tensor, "rows ..."], leading: torch.Size, order: list[int]) -> Tensor:
    """Return [N, ...] as [*leading, ...]: the inverse of `to_rows`."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    trailing = range(len(order), len(order) + x.dim() - 1)
    return x.view([*(leading[dim] for dim in order), *x.shape[1:]]).permute([*inverse, *trailing])


def may_be_overwritten(rows: Shaped[Tensor, "rows columns"]) -> bool:
    """Return whether backward may overwrite these rows [N, V] with their gradient.

    Backward must not overwrite them in three cases:

    - The rows are a leaf or a view of one, which is the caller's own data.
    - Elements share memory (an expanded tensor, sliding windows), but each has its own gradient.
    - Saved-tensor hooks are active, as inside a non-reentrant checkpoint. Autograd then does not check whether a tensor
      that another operation saved was overwritten.
    """
    if rows.is_leaf or (rows._base is not None and rows._base.is_leaf):
        return False
    num_rows, width = rows.shape
    if (width > 1 and rows.stride(1) == 0) or (num_rows > 1 and rows.stride(0) < width * rows.stride(1)):
        return False
    # torch has no public function that returns the hooks, and its stubs do not include this submodule.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is None

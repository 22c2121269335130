"""Floating-point numbers as integers of their own width that grow with them."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def ordered_bits(x: Tensor) -> Tensor:
    """Integers with i(a) < i(b) exactly where a < b: the bits as they are of numbers ≥ 0, all but the sign's turned
    over of the rest. −0 is taken for 0, which it equals. NaN is past the infinity of its sign."""
    return _turn((x + 0.0).view(_INTEGERS[torch.finfo(x.dtype).bits]))


def from_ordered_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of `dtype` that `ordered_bits` came from."""
    return _turn(bits.to(_INTEGERS[torch.finfo(dtype).bits])).view(dtype)


def _turn(bits: Tensor) -> Tensor:
    """Its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

"""Floating-point numbers as integers of their own width that grow with them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def ordered_bits(x: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Return integers with i(a) < i(b) exactly if a < b: the bits of numbers ≥ 0 as they are, all but the sign's turned
    over for the rest. −0 is taken for 0, which it equals. NaN is past the infinity of its sign."""
    return _turn((x + 0.0).view(_INTEGERS[torch.finfo(x.dtype).bits]))


def from_ordered_bits(bits: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return the numbers of `dtype` that `ordered_bits` came from."""
    return _turn(bits.to(_INTEGERS[torch.finfo(dtype).bits])).view(dtype)


def _turn(bits: Tensor) -> Tensor:
    """Return the bits, all but the sign's turned over if the sign is set. The function is its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

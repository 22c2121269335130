"""Map floating-point numbers to integers of the same width that are sorted in the same way."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def ordered_bits(x: Float[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """Return an integer i(x) for each x, such that i(a) < i(b) if and only if a < b.

    The bits of numbers ≥ 0 are unchanged. For negative numbers, all bits except the sign are inverted. −0 is treated as
    0, which it equals. NaN sorts beyond the infinity of its sign.
    """
    return _turn((x + 0.0).view(_INTEGERS[torch.finfo(x.dtype).bits]))


def from_ordered_bits(bits: Int[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return the numbers of `dtype` whose `ordered_bits` are `bits`."""
    return _turn(bits.to(_INTEGERS[torch.finfo(dtype).bits])).view(dtype)


def _turn(bits: Tensor) -> Tensor:
    """Return the bits. If the sign bit is set, all other bits are inverted. The function is its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)

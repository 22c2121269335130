"""RoPE and SwiGLU in Triton, in one pass over their input; torch's operators take two to six.

The functions compute the same as those in `rope.py` and `gated_activation.py`, with the same rounding: a product is
rounded to the tensor's dtype before it is added. Import this module only on a GPU, or for Triton's interpreter.
"""

# pyright: reportCallIssue=false, reportUnboundVariable=false

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
_PAIRS_PER_WARP = 256
_BLOCK = 1024  # columns of an activation that a program computes


def turn_heads(mixed: Tensor, parts: Sequence[Tensor], turns: Tensor, interleaved: bool, back: bool) -> None:
    """Do what `rope.turn_heads` does."""
    query, key, value = parts if len(parts) == 3 else (parts[0],) * 3
    length, batch, groups, heads, dim = mixed.shape
    rotated, pairs = turns.size(-1), _power_of_2(query.size(3)) * _power_of_2(turns.size(-1) // 2)
    strides = [turns.stride(axis) if turns.size(axis) > 1 else 0 for axis in (0, 1)]
    with torch.cuda.device_of(mixed):
        _turn_kernel[(length * batch * groups,)](
            mixed, query, key, value, turns, *strides, batch, groups,
            MIXED_HEADS=heads, HEADS=query.size(3), DIM=dim, ROTATED=rotated, INTERLEAVED=interleaved, BACK=back,
            SPLIT=len(parts) == 3, BLOCK_HEADS=_power_of_2(query.size(3)),
            BLOCK_PAIRS=_power_of_2(rotated // 2), BLOCK_REST=_power_of_2(max(1, dim - rotated)),
            BLOCK_DIM=_power_of_2(dim), num_warps=min(8, max(1, pairs // _PAIRS_PER_WARP)),
            enable_fp_fusion=False,
        )  # fmt: skip


def gated_silu(both: Tensor) -> Tensor:
    """Return silu(gate)·up [..., F] of gate and up, side by side: [..., 2·F]."""
    both = both.contiguous()
    out = both.new_empty(*both.shape[:-1], both.size(-1) // 2)
    width = out.size(-1)
    with torch.cuda.device_of(both):
        _gated_silu_kernel[(out.numel() // width, triton.cdiv(width, _BLOCK))](
            out, both, width, BLOCK=_BLOCK, enable_fp_fusion=False
        )
    return out


def gated_silu_gradient(both: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of `gated_silu`'s input, given that of its output."""
    both, gradient = both.contiguous(), gradient.contiguous()
    out, width = torch.empty_like(both), gradient.size(-1)
    with torch.cuda.device_of(both):
        _gated_silu_gradient_kernel[(gradient.numel() // width, triton.cdiv(width, _BLOCK))](
            out, both, gradient, width, BLOCK=_BLOCK, enable_fp_fusion=False
        )
    return out


def _power_of_2(number: int) -> int:
    """Return the number, rounded up to a power of 2. Triton's own function for this takes ten times as long."""
    return 1 << max(0, number - 1).bit_length()


@triton.jit
@no_type_check
def _turn_kernel(
    mixed, query, key, value, turns, stride_s, stride_b, batch, groups, MIXED_HEADS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, BLOCK_PAIRS)
    half: tl.constexpr = ROTATED // 2
    turns += index // (batch * groups) * stride_s + index // groups % batch * stride_b
    dtype = mixed.dtype.element_ty
    cos = tl.load(turns + pairs, mask=pairs < half, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(turns + half + pairs, mask=pairs < half, other=0.0).to(dtype).to(tl.float32)
    if BACK:
        sin = -sin
    mixed += index * (MIXED_HEADS * DIM)
    query += index * (HEADS * DIM)
    _turn(mixed, query, cos, sin, HEADS, DIM, ROTATED, INTERLEAVED, BACK, BLOCK_HEADS, BLOCK_PAIRS, BLOCK_REST)
    if SPLIT:
        key += index * DIM
        value += index * DIM
        mixed += HEADS * DIM
        _turn(mixed, key, cos, sin, 1, DIM, ROTATED, INTERLEAVED, BACK, 1, BLOCK_PAIRS, BLOCK_REST)
        mixed += DIM
        columns = tl.arange(0, BLOCK_DIM)
        if BACK:
            tl.store(mixed + columns, tl.load(value + columns, mask=columns < DIM), mask=columns < DIM)
        else:
            tl.store(value + columns, tl.load(mixed + columns, mask=columns < DIM), mask=columns < DIM)


@triton.jit
@no_type_check
def _turn(
    mixed, part, cos, sin, HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Write the rotated heads of `mixed` into `part`, or those of `part` into `mixed` if BACK."""
    source, target = mixed, part
    if BACK:
        source, target = part, mixed
    dtype = mixed.dtype.element_ty
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    pairs = tl.arange(0, BLOCK_PAIRS)[None, :]
    if INTERLEAVED:
        at = heads * DIM + 2 * pairs
        step: tl.constexpr = 1
    else:
        at = heads * DIM + pairs
        step: tl.constexpr = ROTATED // 2
    there = (heads < HEADS) & (pairs < ROTATED // 2)
    first = tl.load(source + at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(source + at + step, mask=there, other=0.0).to(tl.float32)
    cos, sin = cos[None, :], sin[None, :]
    turned_first = (first * cos).to(dtype).to(tl.float32) - (second * sin).to(dtype).to(tl.float32)
    turned_second = (second * cos).to(dtype).to(tl.float32) + (first * sin).to(dtype).to(tl.float32)
    tl.store(target + at, turned_first.to(dtype), mask=there)
    tl.store(target + at + step, turned_second.to(dtype), mask=there)
    if ROTATED < DIM:
        columns = ROTATED + tl.arange(0, BLOCK_REST)[None, :]
        at = heads * DIM + columns
        there = (heads < HEADS) & (columns < DIM)
        tl.store(target + at, tl.load(source + at, mask=there), mask=there)


@triton.jit
@no_type_check
def _gated_silu_kernel(out, both, width, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    both += index * 2 * width
    gate = tl.load(both + columns, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + width + columns, mask=there, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    activated = (gate * _sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + index * width + columns, (activated * up).to(dtype), mask=there)


@triton.jit
@no_type_check
def _gated_silu_gradient_kernel(out, both, gradient, width, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < width
    both += index * 2 * width
    out += index * 2 * width
    gate = tl.load(both + columns, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + width + columns, mask=there, other=0.0).to(tl.float32)
    upstream = tl.load(gradient + index * width + columns, mask=there, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    opened = _sigmoid(gate)
    activated = (gate * opened).to(dtype).to(tl.float32)
    scratch = (upstream * up).to(dtype).to(tl.float32)
    tl.store(out + columns, (scratch * opened * (1.0 + gate * (1.0 - opened))).to(dtype), mask=there)
    tl.store(out + width + columns, (upstream * activated).to(dtype), mask=there)


@triton.jit
@no_type_check
def _sigmoid(x):
    return tl.div_rn(1.0, 1.0 + tl.exp2(-x * LOG2_E))

"""RoPE: its frequencies, plain or scaled for longer contexts, and the rotation of queries and keys.

The rotation takes one pass over the output of the projection that computes queries and keys. Autograd of the same
formula would keep and copy several tensors of that size in every layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.config.model import Llama3Rope, RopeScaling, YarnRope
from rl_megatron.model.layers.kernels import find_layer_kernels


def compute_frequencies(dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """Return RoPE's frequencies [dim/2] in fp32, in radians per position: base^(−2i/dim), scaled by `scaling`."""
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling is None:
        return plain
    slow = plain / scaling.factor
    if isinstance(scaling, Llama3Rope):
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    elif isinstance(scaling, YarnRope):
        kept = 1.0 - _compute_ramp(dim, base, scaling)
    else:
        return slow
    return slow * (1.0 - kept) + plain * kept


def _compute_ramp(dim: int, base: float, scaling: YarnRope) -> Tensor:
    """Return YaRN's ramp [dim/2] from 0 to 1, linear in the index of the frequency.

    It is 0 for frequencies with beta_fast or more turns in the original context, and 1 for beta_slow or fewer.
    """

    def index(turns: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001  # avoids a division by 0; the ramp is then a step
    return ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)


def compute_rotary_scale(scaling: RopeScaling | None) -> float:
    """Return the factor by which YaRN multiplies rotated queries and keys. It is 1 for other scalings."""
    if not isinstance(scaling, YarnRope):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return compute_yarn_mscale(scaling.factor, 1.0)
    whole = compute_yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return compute_yarn_mscale(scaling.factor, scaling.mscale) / whole


def compute_yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's 0.1·mscale·ln(factor) + 1, or 1 if `factor` is at most 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


# --- rotation ---


def compute_turns(angles: Tensor) -> Tensor:
    """Return the cosines [..., D/2] of angles [..., D/2], followed by their sines: [..., D]."""
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate(x: Tensor, turns: Tensor, scale: float = 1.0, *, interleaved: bool = False) -> Tensor:
    """Return x [S, B, N, D] rotated by RoPE: (x₁·cos − x₂·sin, x₂·cos + x₁·sin) of the halves x₁ and x₂ of each head.

    Args:
        x: Queries or keys.
        turns: The result of `compute_turns`, broadcastable to x. If it has fewer dimensions than a head, only the
            head's first dimensions are rotated.
        scale: A factor of cosines and sines.
        interleaved: Whether x₁ and x₂ are the even and the odd dimensions instead of the halves.
    """
    return _Rotate.apply(x, turns if scale == 1.0 else turns * scale, interleaved)


def split_and_rotate(
    mixed: Tensor, turns: Tensor, head_dim: int, *, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [S, B, N, D], key [S, B, G, D] and value [S, B, G, D]; query and key are rotated.

    Args:
        mixed: Each group's query heads, key and value, [S, B, G, (N/G + 2)·D].
        turns: The result of `compute_turns`, [S, 1, 1, D] or [1, B, 1, D]; D may be smaller, as in `rotate`.
        head_dim: D.
        interleaved: Whether neighbours are rotated, as in `rotate`.
    """
    return _SplitAndRotate.apply(mixed, turns, head_dim, interleaved)


def turn_heads(mixed: Tensor, parts: Sequence[Tensor], turns: Tensor, interleaved: bool, back: bool) -> None:
    """Write the heads of `mixed` into `parts`, and rotate queries and keys; with `back`, do the inverse.

    Args:
        mixed: [S, B, G, heads, D], contiguous.
        parts: Queries or keys [S, B, G, heads, D]; or query [S, B, G, N/G, D], key and value [S, B, G, 1, D]. All are
            contiguous.
        turns: The result of `compute_turns`, [S or 1, B or 1, 1, at most D].
        interleaved: Whether neighbours are rotated, as in `rotate`.
        back: Whether to rotate `parts` back, and to write the result into `mixed`.
    """
    turns = turns.to(mixed.dtype)[..., None, :]
    if back:
        cos, sin = turns.chunk(2, dim=-1)
        turns = torch.cat([cos, -sin], dim=-1)
    mixed_parts = mixed.split([mixed.size(3) - 2, 1, 1], dim=3) if len(parts) == 3 else (mixed,)
    for index, pair in enumerate(zip(mixed_parts, parts, strict=True)):
        source, target = reversed(pair) if back else pair
        if index < 2:
            _turn(source, turns, target, interleaved)
        else:
            target.copy_(source)


def _turn_heads(mixed: Tensor, parts: Sequence[Tensor], turns: Tensor, interleaved: bool, back: bool) -> None:
    kernels = find_layer_kernels(mixed.device)
    (turn_heads if kernels is None else kernels.turn_heads)(mixed, parts, turns, interleaved, back)


def _turn(x: Tensor, turns: Tensor, out: Tensor, interleaved: bool) -> None:
    """Write the rotated x into `out`. Products are rounded to the dtype before they are added."""
    cos, sin = turns.chunk(2, dim=-1)
    rotated = turns.size(-1)
    first, second = _split_coordinates(x[..., :rotated], interleaved)
    out_first, out_second = _split_coordinates(out[..., :rotated], interleaved)
    product = torch.mul(second, sin)
    torch.mul(first, cos, out=out_first)
    out_first.sub_(product)
    torch.mul(first, sin, out=product)
    torch.mul(second, cos, out=out_second)
    out_second.add_(product)
    if rotated < x.size(-1):
        out[..., rotated:].copy_(x[..., rotated:])


def _split_coordinates(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second coordinates of the pairs that are rotated."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, turns: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(turns)
        ctx.interleaved = interleaved
        out = x.new_empty(x.shape)
        _turn_heads(x.contiguous().unsqueeze(2), [out.unsqueeze(2)], turns, interleaved, False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (turns,) = ctx.saved_tensors
        out = gradient.new_empty(gradient.shape)
        _turn_heads(out.unsqueeze(2), [gradient.contiguous().unsqueeze(2)], turns, ctx.interleaved, True)
        return out, None, None


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed: Tensor, turns: Tensor, head_dim: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(turns)
        ctx.interleaved = interleaved
        ctx.heads_shape = (*mixed.shape[:-1], mixed.size(-1) // head_dim, head_dim)
        *leading, heads, _ = ctx.heads_shape
        parts = [mixed.new_empty(*leading, number, head_dim) for number in (heads - 2, 1, 1)]
        _turn_heads(mixed.contiguous().view(ctx.heads_shape), parts, turns, interleaved, False)
        query, key, value = (part.flatten(2, 3) for part in parts)
        return query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None, None]:
        *leading, heads, head_dim = ctx.heads_shape
        mixed = query.new_empty(ctx.heads_shape)
        numbers = zip((query, key, value), (heads - 2, 1, 1), strict=True)
        parts = [part.contiguous().view(*leading, number, head_dim) for part, number in numbers]
        _turn_heads(mixed, parts, ctx.saved_tensors[0], ctx.interleaved, True)
        return mixed.flatten(3), None, None, None

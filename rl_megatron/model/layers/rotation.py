"""The rotation of queries and keys by RoPE, in one pass over the output of the projection that makes them.

Autograd of the same formula would keep and copy several tensors of that size in every layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def turns_of(angles: Tensor) -> Tensor:
    """Return the cosines [..., D/2] of angles [..., D/2], followed by their sines: [..., D]."""
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotate(x: Tensor, turns: Tensor, scale: float = 1.0, *, interleaved: bool = False) -> Tensor:
    """Return x [S, B, N, D] rotated by RoPE: (x₁·cos − x₂·sin, x₂·cos + x₁·sin) of the halves x₁ and x₂ of each head.

    Args:
        x: Queries or keys.
        turns: The result of `turns_of`, broadcastable to x. If it has fewer dimensions than a head, the head's first
            ones are rotated, and the others are unchanged.
        scale: A factor of cosines and sines.
        interleaved: Whether x₁ and x₂ are the even and the odd dimensions instead of the halves.
    """
    return _Rotate.apply(x, _in_dtype(turns, scale, x.dtype), interleaved)


def split_and_rotate(
    mixed: Tensor, turns: Tensor, head_dim: int, *, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [S, B, N, D], key [S, B, G, D] and value [S, B, G, D]. RoPE has rotated query and key.

    Args:
        mixed: Each group's query heads, key and value, [S, B, G, (N/G + 2)·D].
        turns: The result of `turns_of`, [S, 1, 1, D] or [1, B, 1, D]; D may be smaller, as in `rotate`.
        head_dim: D.
        interleaved: Whether neighbours are rotated, as in `rotate`.
    """
    return _SplitAndRotate.apply(mixed, _in_dtype(turns, 1.0, mixed.dtype), head_dim, interleaved)


def _in_dtype(turns: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (turns if scale == 1.0 else turns * scale).to(dtype)


def _turn(x: Tensor, turns: Tensor, out: Tensor, interleaved: bool) -> None:
    """Write the rotated x into `out`. Products are rounded before they are added, as in the formula."""
    cos, sin = turns.chunk(2, dim=-1)
    rotated = turns.size(-1)
    first, second = _coordinates(x[..., :rotated], interleaved)
    out_first, out_second = _coordinates(out[..., :rotated], interleaved)
    product = torch.mul(second, sin)
    torch.mul(first, cos, out=out_first)
    out_first.sub_(product)
    torch.mul(first, sin, out=product)
    torch.mul(second, cos, out=out_second)
    out_second.add_(product)
    if rotated < x.size(-1):
        out[..., rotated:].copy_(x[..., rotated:])


def _coordinates(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second coordinates of the pairs that are rotated."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def _back(turns: Tensor) -> Tensor:
    """Return the turns of the negative angles, by which gradients are rotated."""
    cos, sin = turns.chunk(2, dim=-1)
    return torch.cat([cos, -sin], dim=-1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, turns: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(turns)
        ctx.interleaved = interleaved
        out = x.new_empty(x.shape)
        _turn(x, turns, out, interleaved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        (turns,) = ctx.saved_tensors
        out = gradient.new_empty(gradient.shape)
        _turn(gradient, _back(turns), out, ctx.interleaved)
        return out, None, None


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed: Tensor, turns: Tensor, head_dim: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(turns)
        ctx.interleaved = interleaved
        ctx.heads_shape = (*mixed.shape[:-1], -1, head_dim)
        query, key, value = _parts(mixed.view(ctx.heads_shape))
        rotated_query, rotated_key = (x.new_empty(x.shape) for x in (query, key))
        _turn(query, turns[..., None, :], rotated_query, interleaved)
        _turn(key, turns[..., None, :], rotated_key, interleaved)
        return rotated_query.flatten(2, 3), rotated_key.flatten(2, 3), value.squeeze(3).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None, None, None]:
        turns = _back(ctx.saved_tensors[0])[..., None, :]
        *leading, _, head_dim = ctx.heads_shape
        groups = leading[-1]
        per_group = query.size(2) // groups
        gradient = query.new_empty(*leading, per_group + 2, head_dim)
        into_query, into_key, into_value = _parts(gradient)
        _turn(query.unflatten(2, (groups, per_group)), turns, into_query, ctx.interleaved)
        _turn(key.unsqueeze(3), turns, into_key, ctx.interleaved)
        into_value.copy_(value.unsqueeze(3))
        return gradient.flatten(3), None, None, None


def _parts(heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of query [S, B, G, N/G, D], key and value [S, B, G, 1, D] in [S, B, G, N/G + 2, D]."""
    query, key, value = heads.split([heads.size(3) - 2, 1, 1], dim=3)
    return query, key, value

"""Zigzag context parallelism: which positions a rank holds, and bringing per-token results back together.

A sequence of length S is cut into 2·cp equal chunks and rank r holds chunks r and 2·cp−1−r, so that causal attention
costs every rank the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def zigzag_shard(x: Tensor, cp_rank: int, cp_size: int, dim: int) -> Tensor:
    """Rank cp_rank's positions along `dim`: chunk cp_rank followed by chunk 2·cp_size−1−cp_rank, of 2·cp_size chunks.

    Shapes: [..., S, ...] → [..., S/cp_size, ...]. Differentiable. With cp_size 1 it returns x itself.
    Raises: ValueError if 2·cp_size does not divide S.
    """
    if cp_size == 1:
        return x
    length = x.shape[dim]
    if length % (2 * cp_size):
        raise ValueError(
            f"context parallelism over {cp_size} ranks cuts a sequence into {2 * cp_size} equal chunks, but dimension "
            f"{dim} has {length} positions; pad the sequence to a multiple of {2 * cp_size}"
        )
    chunk = length // (2 * cp_size)
    early, late = cp_rank, 2 * cp_size - 1 - cp_rank
    return torch.cat([x.narrow(dim, early * chunk, chunk), x.narrow(dim, late * chunk, chunk)], dim=dim)


def zigzag_gather(x: Tensor, cp_group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """Every rank's positions back in order along `dim`: the inverse of `zigzag_shard`, one all-gather.

    Backward hands each rank its own slice of the upstream gradient and communicates nothing. It is therefore the
    gradient of a loss that every rank computes *identically on the whole sequence*; summing over ranks, as an
    all-gather's textbook backward does, would count that one loss cp times.

    Shapes: [..., S/cp, ...] → [..., S, ...]. With cp_group None or of size 1 it returns x itself.
    """
    if cp_group is None or dist.get_world_size(cp_group) == 1:
        return x
    return _ZigzagGather.apply(x, cp_group, dim)


class _ZigzagGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cp_group, dim):
        ctx.cp_rank, ctx.cp_size, ctx.dim = dist.get_rank(cp_group), dist.get_world_size(cp_group), dim
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(ctx.cp_size)]
        dist.all_gather(parts, x, group=cp_group)
        early, late = zip(*(part.chunk(2, dim=dim) for part in parts), strict=True)
        return torch.cat([*early, *reversed(late)], dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return zigzag_shard(gradient, ctx.cp_rank, ctx.cp_size, ctx.dim), None, None

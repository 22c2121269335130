"""Zigzag context parallelism: how a sequence is cut over the context-parallel ranks, and put together again.

A sequence of S tokens, S a multiple of 2·cp, is cut into 2·cp chunks; rank r holds chunks r and 2·cp−1−r, so that
causal attention costs every rank the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def zigzag_positions(sequence_length: int, cp_rank: int, cp_size: int, device: torch.device | None = None) -> Tensor:
    """The positions, [S/cp], in the whole sequence of the tokens that `cp_rank` holds."""
    if sequence_length % (2 * cp_size):
        raise ValueError(f"sequence length {sequence_length} is not a multiple of 2·cp = {2 * cp_size}; pad the rows")
    chunk = sequence_length // (2 * cp_size)
    head = torch.arange(cp_rank * chunk, (cp_rank + 1) * chunk, device=device)
    tail_start = (2 * cp_size - 1 - cp_rank) * chunk
    return torch.cat([head, torch.arange(tail_start, tail_start + chunk, device=device)])


def zigzag_shard(x: Tensor, cp_rank: int, cp_size: int, dim: int) -> Tensor:
    """This rank's slice of a tensor that is whole along `dim`; the tensor itself where cp_size is 1."""
    if cp_size == 1:
        return x
    return x.index_select(dim, zigzag_positions(x.size(dim), cp_rank, cp_size, x.device))


def zigzag_gather(x: Tensor, cp_group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """The whole sequence from every rank's slice, where every rank then computes the *same* loss from it.

    Backward hands each rank its own slice of the gradient, with no collective: summing the ranks' identical gradients
    would count each token cp times.
    """
    if cp_group is None or cp_group.size() == 1:
        return x
    return _ZigzagGather.apply(x, cp_group, dim, False)


def zigzag_gather_and_reduce(x: Tensor, cp_group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """The whole sequence from every rank's slice, where each rank then computes *its own part* from it (keys and
    values, read by every rank's queries): backward sums the ranks' gradients, then slices."""
    if cp_group is None or cp_group.size() == 1:
        return x
    return _ZigzagGather.apply(x, cp_group, dim, True)


class _ZigzagGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cp_group: dist.ProcessGroup, dim: int, reduce_gradient: bool) -> Tensor:
        ctx.cp_group, ctx.dim, ctx.reduce_gradient = cp_group, dim, reduce_gradient
        cp_size = cp_group.size()
        slices = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(cp_size)]
        dist.all_gather(slices, x.contiguous(), group=cp_group)
        halves = [part.chunk(2, dim) for part in slices]
        return torch.cat([head for head, _ in halves] + [tail for _, tail in reversed(halves)], dim)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        group = ctx.cp_group
        if ctx.reduce_gradient:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=group)
        return zigzag_shard(gradient, group.rank(), group.size(), ctx.dim), None, None, None

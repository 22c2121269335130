"""Zigzag context parallelism: how a sequence is cut over the context-parallel ranks, and put together again.

A sequence of S tokens, S a multiple of 2·cp, is cut into 2·cp chunks; rank r holds chunks r and 2·cp−1−r, so that
causal attention costs every rank the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def zigzag_positions(sequence_length: int, cp_rank: int, cp_size: int, device: torch.device | None = None) -> Tensor:
    """The positions, [S/cp], in the whole sequence of the tokens that `cp_rank` holds."""
    chunk = _chunk_length(sequence_length, cp_size)
    head, tail = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
    within = torch.arange(chunk, device=device)
    return torch.cat([head + within, tail + within])


def _chunk_length(sequence_length: int, cp_size: int) -> int:
    if sequence_length % (2 * cp_size):
        raise ValueError(
            f"context parallelism over {cp_size} ranks cuts a sequence into {2 * cp_size} equal chunks, and "
            f"{sequence_length} positions do not divide; pad the rows to a multiple of {2 * cp_size}"
        )
    return sequence_length // (2 * cp_size)


def zigzag_shard(x: Tensor, cp_rank: int, cp_size: int, dim: int) -> Tensor:
    """This rank's chunks of a tensor that is whole along `dim`; the tensor itself where cp_size is 1. Differentiable.

    Shapes: [..., S, ...] → [..., S/cp_size, ...]. Raises: ValueError where 2·cp_size does not divide S.
    """
    if cp_size == 1:
        return x
    chunk = _chunk_length(x.size(dim), cp_size)
    head, tail = cp_rank * chunk, (2 * cp_size - 1 - cp_rank) * chunk
    return torch.cat([x.narrow(dim, head, chunk), x.narrow(dim, tail, chunk)], dim)


def zigzag_gather_and_reduce(x: Tensor, cp_group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """The whole sequence from every rank's slice, where each rank then computes *its own part* from it (keys and
    values, read by every rank's queries): backward sums the ranks' gradients, then slices."""
    if cp_group is None or cp_group.size() == 1:
        return x
    return _ZigzagGather.apply(x, cp_group, dim)


class _ZigzagGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cp_group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.cp_group, ctx.dim = cp_group, dim
        cp_size = cp_group.size()
        slices = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(cp_size)]
        dist.all_gather(slices, x.contiguous(), group=cp_group)
        halves = [part.chunk(2, dim) for part in slices]
        return torch.cat([head for head, _ in halves] + [tail for _, tail in reversed(halves)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        group = ctx.cp_group
        gradient = gradient.clone(memory_format=torch.contiguous_format)  # autograd's own must stay as it is
        dist.all_reduce(gradient, group=group)
        return zigzag_shard(gradient, group.rank(), group.size(), ctx.dim), None, None

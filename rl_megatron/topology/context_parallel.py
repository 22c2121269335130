"""Zigzag context parallelism: how a sequence is cut over the context-parallel ranks, and put together again.

A sequence of S tokens, S a multiple of 2·cp, is cut into 2·cp chunks; rank r holds chunks r and 2·cp−1−r, so that
causal attention costs every rank the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def zigzag_slices(cp_size: int) -> int:
    """Return into how many equal chunks a sequence is cut, of which its length is therefore a multiple."""
    return 1 if cp_size == 1 else 2 * cp_size


def zigzag_positions(sequence_length: int, cp_rank: int, cp_size: int, device: torch.device | None = None) -> Tensor:
    """Return the positions `[S/cp]` in the whole sequence of the tokens that `cp_rank` holds.

    Raises:
        ValueError: 2·cp_size does not divide the sequence.
    """
    if sequence_length % (2 * cp_size):
        raise ValueError(
            f"context parallelism over {cp_size} ranks cuts a sequence into {2 * cp_size} equal chunks, and "
            f"{sequence_length} positions do not divide; pad the sequences to a multiple of {2 * cp_size}"
        )
    slice_length = sequence_length // (2 * cp_size)
    head, tail = cp_rank * slice_length, (2 * cp_size - 1 - cp_rank) * slice_length
    within = torch.arange(slice_length, device=device)
    return torch.cat([head + within, tail + within])


def gather_and_reduce(x: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return every rank's `[n, …]` as `[cp·n, …]` in rank order, of which each rank then computes *its own part*.

    It is for keys and values, which every rank's queries read: backward sums the ranks' gradients and gives each rank
    its slice.
    """
    if cp_group is None or cp_group.size() == 1:
        return x
    return _GatherAndReduce.apply(x, cp_group)


def zigzag_gather_and_reduce(x: Tensor, cp_group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """Return the whole sequence in order of one that is cut zigzag along `dim`; backward as `gather_and_reduce`."""
    if cp_group is None or cp_group.size() == 1:
        return x
    parts = gather_and_reduce(x[None], cp_group).unbind(0)
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([head for head, _ in halves] + [tail for _, tail in reversed(halves)], dim)


class _GatherAndReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cp_group: dist.ProcessGroup) -> Tensor:
        ctx.cp_group, ctx.num_local = cp_group, x.size(0)
        whole = x.new_empty(cp_group.size(), *x.shape)
        dist.all_gather(list(whole.unbind(0)), x.contiguous(), group=cp_group)
        return whole.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        mine = gradient.new_empty(ctx.num_local, *gradient.shape[1:])
        dist.reduce_scatter_tensor(mine, gradient.contiguous(), group=ctx.cp_group)
        return mine, None

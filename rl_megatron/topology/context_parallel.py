"""Split hidden states in zigzag order over the context-parallel ranks, and put them together again for attention.

A sequence of S tokens, S a multiple of 2·cp, is cut into 2·cp slices. Rank r holds the slices r and 2·cp−1−r, so that
causal attention costs every rank the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.topology.collectives import gather_from_ranks, reduce_scatter


def zigzag_positions(sequence_length: int, cp_rank: int, cp_size: int, device: torch.device | None = None) -> Tensor:
    """Return the positions `[S/cp]`, in the whole sequence, of the tokens that `cp_rank` holds."""
    if sequence_length % (2 * cp_size):
        raise ValueError(
            f"context parallelism over {cp_size} ranks cuts a sequence into {2 * cp_size} equal slices, but "
            f"{2 * cp_size} does not divide its {sequence_length} positions; pad the sequences to a multiple of "
            f"{2 * cp_size}"
        )
    slice_length = sequence_length // (2 * cp_size)
    head, tail = cp_rank * slice_length, (2 * cp_size - 1 - cp_rank) * slice_length
    within = torch.arange(slice_length, device=device)
    return torch.cat([head + within, tail + within])


def gather_and_reduce(x: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Gather every rank's `[n, …]` into `[cp·n, …]` in rank order; backward sums the gradients of all ranks.

    It is used for keys and values, because the queries of every rank attend to all of them. Backward is a
    reduce-scatter: each rank gets the summed gradient of its own part.
    """
    if cp_group is None or cp_group.size() == 1:
        return x
    return _GatherAndReduce.apply(x, cp_group)


def zigzag_gather_and_reduce(x: Tensor, cp_group: dist.ProcessGroup | None, dim: int) -> Tensor:
    """Gather a zigzag-cut sequence along `dim`, in the order of its positions; backward as in `gather_and_reduce`."""
    if cp_group is None or cp_group.size() == 1:
        return x
    parts = gather_and_reduce(x[None], cp_group).unbind(0)
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat([head for head, _ in halves] + [tail for _, tail in reversed(halves)], dim)


def scatter_heads(x: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's heads of all tokens, [cp·n, B, G/cp, …], given all heads of its tokens, `[n, B, G, …]`.

    The tokens are in rank order, and rank r gets the r-th block of G/cp heads. `gather_heads` is the inverse.
    """
    if cp_group is None or cp_group.size() == 1:
        return x
    by_rank = x.unflatten(2, (cp_group.size(), -1)).movedim(2, 0)
    return all_to_all(cp_group, by_rank).flatten(0, 1)


def gather_heads(x: Tensor, cp_group: dist.ProcessGroup | None) -> Tensor:
    """Return all heads of this rank's tokens, [n, B, G, …], given its heads of all tokens, `[cp·n, B, G/cp, …]`."""
    if cp_group is None or cp_group.size() == 1:
        return x
    by_rank = x.unflatten(0, (cp_group.size(), -1))
    return all_to_all(cp_group, by_rank).movedim(0, 2).flatten(2, 3)


def zigzag_order(sequence_length: int, cp_size: int, device: torch.device | None = None) -> Tensor:
    """Return `[S]`: for each position of a sequence, its index among the tokens of all ranks in rank order."""
    positions = [zigzag_positions(sequence_length, rank, cp_size, device) for rank in range(cp_size)]
    return torch.cat(positions).argsort()


class _GatherAndReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cp_group: dist.ProcessGroup) -> Tensor:
        ctx.cp_group, ctx.num_local = cp_group, x.size(0)
        return gather_from_ranks(x, cp_group).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        local = gradient.new_empty(ctx.num_local, *gradient.shape[1:])
        reduce_scatter(local, gradient.contiguous(), group=ctx.cp_group)
        return local, None

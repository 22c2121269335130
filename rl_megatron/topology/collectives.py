"""Collectives with one input and one output tensor, under the names that the installed version of torch gives them.

NCCL gathers into one tensor; if the output is a list of tensors, torch copies each part again.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed both functions.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather(into: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Write all ranks' `x` [n, …] into `into` [ranks·n, …], in rank order."""
    return getattr(dist, ALL_GATHER)(into, x, group=group, async_op=async_op)


def reduce_scatter(into: Tensor, x: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> dist.Work | None:
    """Write this rank's part [n, …] of the sum of all ranks' `x` [ranks·n, …] into `into`."""
    return getattr(dist, REDUCE_SCATTER)(into, x, group=group, async_op=async_op)


def gather_from_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return all ranks' `x` [n, …] as [ranks, n, …] in rank order, without a gradient. Group None: this rank alone."""
    if group is None or group.size() == 1:
        return x[None]
    parts = x.new_empty(group.size(), *x.shape)
    all_gather(parts.flatten(0, 1), x.contiguous(), group)
    return parts

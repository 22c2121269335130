"""Gather the tokens of an expert on the ranks that split its matrices, and add up their outputs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor

_gather: Any = token_dispatcher.gather_from_sequence_parallel_region
_reduce_scatter: Any = token_dispatcher.reduce_scatter_to_sequence_parallel_region


def gather_unequal_numbers() -> None:
    """Let megatron-core's dispatchers use `gather` and `reduce_scatter`.

    Ranks have different numbers of tokens for an expert. gloo's own collectives refuse them.
    """
    dispatcher: Any = token_dispatcher
    dispatcher.gather_from_sequence_parallel_region = gather
    dispatcher.reduce_scatter_to_sequence_parallel_region = reduce_scatter


def gather(
    input_: Tensor, *, group: dist.ProcessGroup, output_split_sizes: list[int] | None = None, **options: Any
) -> Tensor:
    """Return the rows of all ranks of the group, one rank's after the other's. Backward adds up the ranks' gradients.

    Args:
        input_: This rank's rows.
        group: The ranks.
        output_split_sizes: The number of rows of each rank, or None if they have equally many.
        **options: Other arguments of megatron-core's function, which is called for equal numbers.
    """
    if output_split_sizes is None:
        return _gather(input_, group=group, **options)
    copies = torch.cat([input_] * group.size())
    return all_to_all(group, copies, output_split_sizes, [len(input_)] * group.size())


def reduce_scatter(
    input_: Tensor, *, group: dist.ProcessGroup, input_split_sizes: list[int] | None = None, **options: Any
) -> Tensor:
    """Return this rank's rows, each the sum of those that the ranks of the group have for it.

    Args:
        input_: The rows for all ranks, one rank's after the other's.
        group: The ranks.
        input_split_sizes: The number of rows of each rank, or None if they have equally many.
        **options: Other arguments of megatron-core's function, which is called for equal numbers.
    """
    if input_split_sizes is None:
        return _reduce_scatter(input_, group=group, **options)
    own = input_split_sizes[group.rank()]
    received = all_to_all(group, input_, [own] * group.size(), input_split_sizes)
    return received.unflatten(0, (group.size(), own)).sum(0)

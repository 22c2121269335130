"""Replacements of functions of megatron-core's token dispatchers.

`permute` groups tokens by expert without waiting for the GPU. `gather` and `reduce_scatter` allow different numbers of
tokens on the ranks that split an expert's matrices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor

_permute: Any = moe_utils.permute
_gather: Callable[..., Tensor] = token_dispatcher.gather_from_sequence_parallel_region
_reduce_scatter: Callable[..., Tensor] = token_dispatcher.reduce_scatter_to_sequence_parallel_region


def permute_without_waiting() -> None:
    """Make megatron-core's dispatchers group tokens by `permute`, if their own function waits for the GPU.

    Before 0.19, megatron-core selects entries by a mask. To count the selected entries, the host waits for the GPU
    twice in every layer with experts, although their number is known if no tokens are dropped.
    """
    if "align_size" not in inspect.signature(_permute).parameters:  # 0.19 has it, and does not wait
        token_dispatcher.permute = permute


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return what megatron-core's `permute` returns, with the same values.

    Args:
        tokens: [T, H].
        routing_map: Whether a token is sent to an expert, [T, E].
        probs: The weight of a token's expert, [T, E].
        num_out_tokens: The number of entries of `routing_map` that are true. If the host does not know it, or if
            `fused` or `drop_and_pad` is true, megatron-core's function is called.
        fused: Whether Transformer Engine permutes.
        drop_and_pad: Whether all experts get the same number of tokens.

    Returns:
        The tokens, grouped by expert, [num_out_tokens, H]; their weights [num_out_tokens]; their indices in `tokens`.
    """
    if fused or drop_and_pad or not isinstance(num_out_tokens, int):
        return _permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    chosen = routing_map.bool().T.contiguous()
    entries = torch.nonzero_static(chosen.view(-1), size=num_out_tokens)[:, 0]  # sorted by expert
    places = entries % len(tokens)
    grouped = None if probs is None else probs.T.contiguous().view(-1).index_select(0, entries)
    return tokens.index_select(0, places), grouped, places


def gather_unequal_numbers() -> None:
    """Make megatron-core's dispatchers use `gather` and `reduce_scatter`.

    Ranks have different numbers of tokens for an expert, which gloo's own collectives refuse.
    """
    dispatcher: Any = token_dispatcher
    dispatcher.gather_from_sequence_parallel_region = gather
    dispatcher.reduce_scatter_to_sequence_parallel_region = reduce_scatter


def gather(
    input_: Tensor, *, group: dist.ProcessGroup, output_split_sizes: list[int] | None = None, **options: object
) -> Tensor:
    """Return the rows of all ranks of the group, in rank order. Backward adds up the ranks' gradients.

    Args:
        input_: This rank's rows.
        group: The ranks.
        output_split_sizes: The number of rows of each rank, or None if all ranks have equally many.
        **options: Other arguments of megatron-core's function, which is called if `output_split_sizes` is None.
    """
    if output_split_sizes is None:
        return _gather(input_, group=group, **options)
    copies = torch.cat([input_] * group.size())
    return all_to_all(group, copies, output_split_sizes, [len(input_)] * group.size())


def reduce_scatter(
    input_: Tensor, *, group: dist.ProcessGroup, input_split_sizes: list[int] | None = None, **options: object
) -> Tensor:
    """Return this rank's rows, each summed over the ranks of the group.

    Args:
        input_: The rows for all ranks, in rank order.
        group: The ranks.
        input_split_sizes: The number of rows of each rank, or None if all ranks have equally many.
        **options: Other arguments of megatron-core's function, which is called if `input_split_sizes` is None.
    """
    if input_split_sizes is None:
        return _reduce_scatter(input_, group=group, **options)
    count = input_split_sizes[group.rank()]
    received = all_to_all(group, input_, [count] * group.size(), input_split_sizes)
    return received.unflatten(0, (group.size(), count)).sum(0)

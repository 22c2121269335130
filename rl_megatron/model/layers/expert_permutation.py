"""Group tokens by their experts without a wait for the GPU."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch import Tensor

_permute: Any = moe_utils.permute


def permute_without_waiting() -> None:
    """Let megatron-core's dispatchers group tokens by `permute`, if their own way waits for the GPU.

    Before 0.19, megatron-core selects entries by a mask, and torch has to know how many there are: the host waits for
    the GPU twice in every layer with experts. If no tokens are dropped, the number is known.
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
        routing_map: Whether a token goes to an expert, [T, E].
        probs: The weight of a token's expert, [T, E].
        num_out_tokens: The number of entries of `routing_map` that are true. If the host does not know it,
            megatron-core's way is taken, as with the next two.
        fused: Whether Transformer Engine permutes.
        drop_and_pad: Whether each expert has an equal number of tokens.

    Returns:
        The tokens, grouped by expert, [num_out_tokens, H]; their weights [num_out_tokens]; their places in `tokens`.
    """
    if fused or drop_and_pad or not isinstance(num_out_tokens, int):
        return _permute(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    chosen = routing_map.bool().T.contiguous()
    entries = torch.nonzero_static(chosen.view(-1), size=num_out_tokens)[:, 0]  # sorted by expert
    places = entries % len(tokens)
    grouped = None if probs is None else probs.T.contiguous().view(-1).index_select(0, entries)
    return tokens.index_select(0, places), grouped, places

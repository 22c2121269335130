"""Causal attention without a mask in memory, by torch kernels that this module calls directly."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attends_last(query: Tensor, value: Tensor) -> bool:
    """Return whether `attend_last` supports these queries and values [S, B, heads, D]."""
    dim = query.size(-1)
    return (
        query.is_cuda
        and query.dtype is not torch.float32
        and dim == value.size(-1)
        and dim % 8 == 0
        and dim <= 256
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def attend_last(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return causal attention [S_q, B, N·D] of queries at the last S_q of S_k positions, without a mask in memory.

    torch offers this as `causal_lower_right`, which fails under dispatch modes such as FlopCounterMode. So the operator
    behind it is called directly.
    """
    output, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), 0.0, True, scale=scale
    )
    return output.permute(2, 0, 1, 3).flatten(2)


def attend_by_cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Return causal attention [S, B, N·D] with as many queries as keys, computed by cuDNN.

    cuDNN builds a plan for every new shape, forward and backward, and keeps it. Building a plan took 0.15 to 2 seconds
    on an H200.
    """
    output, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), None, torch.is_grad_enabled(),
        0.0, True, scale=scale,
    )  # fmt: skip
    return output.permute(2, 0, 1, 3).flatten(2)


def attend_within_pack(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Return causal attention [T, N·D] within each sequence of a pack, by torch's flash kernel.

    Args:
        query: [T, N, D].
        key: [T, G, D].
        value: [T, G, D].
        starts: [sequences + 1] int32, the cumulative lengths of the sequences (cu_seqlens).
        longest: The longest sequence's length.
        scale: The factor of the scores. None means 1/√D.
    """
    output, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, starts, starts, longest, longest, 0.0, True, False, scale=scale
    )
    return output.flatten(1)

"""Causal attention without a mask in memory, by torch kernels that this module calls directly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_GPU = torch.ops.aten._scaled_dot_product_efficient_attention
_GPU_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward
_GPU_MULTIPLE = 32  # a GPU's kernel pads log-sum-exps to a multiple of it


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


class Attended(NamedTuple):
    """The result of attention.

    Attributes:
        output: [B, N, S_q, Dv].
        log_sum: [B, N, S_q] The log-sum-exp of each query's scores.
        random: The state of a GPU's kernel.
    """

    output: Tensor
    log_sum: Tensor
    random: tuple[Tensor, ...] = ()


def attend_with_log_sum(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None
) -> Attended:
    """Return attention with its log-sum-exps.

    Args:
        query: [B, N, S_q, D].
        key: [B, N, S_k, D].
        value: [B, N, S_k, Dv].
        bias: What to add to the scores, broadcastable to [B, N, S_q, S_k].
        is_causal: Whether a query attends only to the keys up to its own position. Then `bias` is None.
        scale: The factor of the scores. None means 1/√D.
    """
    if query.device.type == "cpu":
        scale = query.size(-1) ** -0.5 if scale is None else scale
        output, log_sum = _CPU(*_widen(query, key, value), 0.0, is_causal, attn_mask=bias, scale=scale)
        return Attended(output[..., : value.size(-1)], log_sum)
    if bias is not None:
        bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    output, log_sum, *random = _GPU(query, key, value, bias, True, 0.0, is_causal, scale=scale)
    return Attended(output, log_sum[..., : query.size(2)], tuple(random))  # the kernel pads log_sum


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool,
    scale: float | None, attended: Attended,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value of `attend_with_log_sum`.

    The kernels compute the shares of the keys from the log-sum-exps, and their mean gradient from `gradient` and the
    output. So if a query also attends to other keys, `attended` has the output and the log-sum-exps for all of them.
    """
    output, log_sum, random = attended
    if query.device.type == "cpu":
        scale = query.size(-1) ** -0.5 if scale is None else scale
        *tensors, output, gradient = _widen(query, key, value, output, gradient)
        gradients = _CPU_BACKWARD(gradient, *tensors, output, log_sum, 0.0, is_causal, attn_mask=bias, scale=scale)
        for_query, for_key, for_value = (
            gradient[..., : x.size(-1)] for gradient, x in zip(gradients, (query, key, value), strict=True)
        )
        return for_query, for_key, for_value
    if bias is not None:
        bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    padded = pad(log_sum, (0, -log_sum.size(-1) % _GPU_MULTIPLE), value=torch.inf)
    return _GPU_BACKWARD(
        gradient, query, key, value, bias, output, padded, *random, 0.0, [True, True, True, False], is_causal,
        scale=scale,
    )[:3]  # fmt: skip


def _widen(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with zeros at the end of their last dimension: the CPU's kernel needs one size for all."""
    size = max(x.size(-1) for x in tensors)
    return [x if x.size(-1) == size else pad(x, (0, size - x.size(-1))) for x in tensors]

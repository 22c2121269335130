"""Attention with sinks (gpt-oss): a learned score per head takes a share of each softmax and adds no value.

    p = softmax([scores, sink])     output = p[without the sink] · V

torch's kernels have no sinks, but they return the log-sum-exp of each softmax. With it, the output without the sink can
be rescaled to the output with the sink. Their backward computes p from the log-sum-exp, and the mean gradient of p from
the output. So if both include the sink, it returns the gradients of attention with sinks.

Source: OpenAI 2025, gpt-oss model card (arXiv:2508.10925), §2.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_GPU = torch.ops.aten._scaled_dot_product_efficient_attention
_GPU_BACKWARD = torch.ops.aten._scaled_dot_product_efficient_attention_backward


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor | None, scale: float | None
) -> Tensor:
    """Return attention with sinks [B, N, S_q, D].

    Args:
        query: [B, N, S_q, D].
        key: [B, N, S_k, D].
        value: [B, N, S_k, D].
        sinks: [N], the sink's score of each head.
        bias: What to add to the scores, broadcastable to [B, N, S_q, S_k]. None means causal attention of as many
            queries as keys.
        scale: The factor of the scores. None means 1/√D.
    """
    return _SinkAttention.apply(query, key, value, sinks, bias, scale)


@torch.no_grad()
def attend_once_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor | None, scale: float | None
) -> Tensor:
    """Return attention with sinks [n, G, R, D] of one token per sequence; R heads share a key. No gradients.

    Args:
        query: [n, G, R, D].
        key: [n, G, S, D].
        value: [n, G, S, D].
        sinks: [G·R].
        bias: What to add to the scores, broadcastable to [n, G, R, S].
        scale: The factor of the scores. None means 1/√D.
    """
    output, log_sum, _ = _attend(query, key, value, bias, scale)
    return _add_sinks(output, log_sum, sinks.view(query.size(1), -1))[0]


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor | None, scale: float | None
    ) -> Tensor:
        if bias is not None and query.is_cuda:  # backward on a GPU needs the expanded bias, too
            bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
        output, log_sum, random = _attend(query, key, value, bias, scale)
        output, log_sum = _add_sinks(output, log_sum, sinks[:, None])
        ctx.save_for_backward(query, key, value, sinks, bias, output, log_sum, *random)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, bias, output, log_sum, *random = ctx.saved_tensors
        if query.device.type == "cpu":
            tensor_gradients = _CPU_BACKWARD(
                gradient, query, key, value, output, log_sum, 0.0, bias is None, attn_mask=bias, scale=ctx.scale
            )
        else:
            tensor_gradients = _GPU_BACKWARD(
                gradient, query, key, value, bias, output, log_sum, *random, 0.0, [True, True, True, False],
                bias is None, scale=ctx.scale,
            )[:3]  # fmt: skip
        # A sink has no value, so its score's gradient is −p·(the mean gradient of p); that mean is gradient · output.
        query_log_sum = log_sum[..., : output.size(2)]  # a GPU's kernel pads log_sum
        share = (sinks[:, None].float() - query_log_sum).exp()
        sink_gradients = -(share * (gradient.float() * output.float()).sum(-1)).sum((0, 2))
        return *tensor_gradients, sink_gradients.to(sinks.dtype), None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return attention without sinks, its log-sum-exps [B, N, S_q or more], and the kernel's random state."""
    if query.device.type == "cpu":
        output, log_sum = _CPU(query, key, value, 0.0, bias is None, attn_mask=bias, scale=scale)
        return output, log_sum, ()
    if bias is not None:
        bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    output, log_sum, *random = _GPU(query, key, value, bias, True, 0.0, bias is None, scale=scale)
    return output, log_sum, tuple(random)


def _add_sinks(output: Tensor, log_sum: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exps with the sinks. `sinks` must be broadcastable to `log_sum`."""
    total = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
    kept = (log_sum - total).exp()[..., : output.size(2), None]
    return (output * kept).to(output.dtype), total

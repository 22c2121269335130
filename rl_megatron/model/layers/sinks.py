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

from rl_megatron.model.layers.attention_kernels import Attended, attend_backward, attend_with_log_sum


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
    output, log_sum, _ = attend_with_log_sum(query, key, value, bias, bias is None, scale)
    return add_sinks(output, log_sum, sinks.view(query.size(1), -1))[0]


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bias: Tensor | None, scale: float | None
    ) -> Tensor:
        output, log_sum, random = attend_with_log_sum(query, key, value, bias, bias is None, scale)
        output, log_sum = add_sinks(output, log_sum, sinks[:, None])
        ctx.save_for_backward(query, key, value, sinks, bias, output, log_sum, *random)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, bias, output, log_sum, *random = ctx.saved_tensors
        tensor_gradients = attend_backward(
            gradient, query, key, value, bias, bias is None, ctx.scale, Attended(output, log_sum, tuple(random))
        )
        sink_gradients = compute_sink_gradients(gradient, output, log_sum, sinks[:, None]).sum((0, 2))
        return *tensor_gradients, sink_gradients.to(sinks.dtype), None, None


def add_sinks(output: Tensor, log_sum: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exps with the sinks. `sinks` must be broadcastable to `log_sum`."""
    total = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
    return (output * (log_sum - total).exp()[..., None]).to(output.dtype), total


def compute_sink_gradients(gradient: Tensor, output: Tensor, log_sum: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient that each query gives to its sink, of the shape of `log_sum`.

    A sink has no value. So its score's gradient is −p times the mean gradient of p, which is gradient · output.
    """
    share = (sinks.to(log_sum.dtype) - log_sum).exp()
    return -share * (gradient.to(log_sum.dtype) * output.to(log_sum.dtype)).sum(-1)

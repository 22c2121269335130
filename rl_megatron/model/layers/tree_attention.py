"""Attention within prefix trees: a token attends to earlier tokens of its segment, and to all ancestors of the segment.

The segments of a pack lie depth first. So the tokens below a segment follow it without a gap, and attend to it in one
call of a kernel, without a copy of its keys and values. torch's flash kernel computes a whole level of ancestors in one
call. Each part returns its output and its log-sum-exp, with which parts are merged:

    l = log Σ_i exp(l_i)          o = Σ_i exp(l_i − l)·o_i

In the backward pass, a kernel that gets the merged l and o computes the share of its part in the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.model.layers.attention_kernels import Attended, attend_backward, attend_with_log_sum
from rl_megatron.model.layers.packed_tree import AttentionPart, FlashCall, PackedTree
from rl_megatron.model.layers.sinks import add_sinks, compute_sink_gradients

Biases = Sequence[Tensor | None]
_Triple = tuple[Tensor, Tensor, Tensor]
_FLASH = torch.ops.aten._flash_attention_forward
_FLASH_BACKWARD = torch.ops.aten._flash_attention_backward


def attend_in_tree(
    query: Tensor, key: Tensor, value: Tensor, tree: PackedTree, own_biases: Biases,
    parts: Sequence[tuple[AttentionPart, Tensor | None]], scale: float | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention [Q, N·Dv] of the tokens of a tree.

    Args:
        query: [Q, N, D] The queries of this rank's tokens.
        key: [T, G, D] The keys of all tokens of the pack, in its order.
        value: [T, G, Dv].
        tree: The segments.
        own_biases: For each bucket of segments, what to add to the scores of a segment's own keys, broadcastable to
            [segments, N, queries, keys]. None means causal attention.
        parts: The attention to ancestors: its queries and keys, and what to add to their scores [queries, keys].
        scale: The factor of the scores. None means 1/√D.
        sinks: [N], the score of each head's sink, or None.
    """
    if query.is_cuda and key.size(1) != query.size(1):  # the kernel that accepts a bias lacks grouped queries
        key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
    return _TreeAttention.apply(query, key, value, sinks, tree, own_biases, parts, scale).flatten(1)


def attend_in_tree_by_flash(
    query: Tensor, key: Tensor, value: Tensor, calls: Sequence[FlashCall], scale: float | None, sinks: Tensor | None
) -> Tensor:
    """Return `attend_in_tree` without a window, by torch's flash kernel. `calls` are the tree's `flash_calls`."""
    return _FlashTreeAttention.apply(query, key, value, sinks, calls, scale).flatten(1)


class _FlashTreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, calls: Sequence[FlashCall],
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        merged, log_sum, randoms = None, None, []
        for call in calls:
            output, more, *random, _ = _FLASH(query, key, value, *call.sizes, 0.0, call.is_causal, False, scale=scale)
            randoms.append(random)
            more = more.T
            if call.reads is not None:  # the kernel returns +inf for queries without keys
                more = more.masked_fill(~call.reads[:, None], -torch.inf)
            if merged is None or log_sum is None:
                merged, log_sum = output.to(torch.promote_types(output.dtype, torch.float32)), more
                continue
            total = torch.logaddexp(log_sum, more)
            merged.mul_((log_sum - total).exp()[..., None]).add_(output * (more - total).exp()[..., None])
            log_sum = total
        assert merged is not None and log_sum is not None
        if sinks is not None:
            merged, log_sum = add_sinks(merged, log_sum, sinks)
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, merged, log_sum)
        ctx.calls, ctx.scale, ctx.randoms = calls, scale, randoms
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        totals: list[Tensor] = []
        # The sum of many levels would be inexact in bf16.
        dtype = torch.promote_types(query.dtype, torch.float32) if len(ctx.calls) > 2 else query.dtype
        sums_by_head = log_sum.T.contiguous()
        for call, random in zip(ctx.calls, ctx.randoms, strict=True):
            gradients = _FLASH_BACKWARD(
                gradient, query, key, value, output, sums_by_head, *call.sizes, 0.0, call.is_causal, *random,
                scale=ctx.scale,
            )  # fmt: skip
            gradients = [x.to(dtype) for x in gradients]
            totals = [total.add_(x) for total, x in zip(totals, gradients, strict=True)] if totals else gradients
        for_sinks = None
        if sinks is not None:
            for_sinks = compute_sink_gradients(gradient, output, log_sum, sinks).sum(0).to(sinks.dtype)
        return *(total.to(query.dtype) for total in totals), for_sinks, None, None


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, tree: PackedTree,
        own_biases: Biases, parts: Sequence[tuple[AttentionPart, Tensor | None]], scale: float | None,
    ) -> Tensor:  # fmt: skip
        outputs, log_sums, randoms = [], [], []
        for batch, bias in zip(_split(tree, query, key, value), own_biases, strict=True):
            output, log_sum, random = attend_with_log_sum(*batch, bias, bias is None, scale)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            log_sums.append(log_sum.transpose(1, 2).flatten(0, 1))
            randoms.append(random)
        merged = torch.cat(outputs).index_select(0, tree.slots)
        merged = merged.to(torch.promote_types(merged.dtype, torch.float32))
        log_sum = torch.cat(log_sums).index_select(0, tree.slots)
        for part, bias in parts:
            output, more, random = attend_with_log_sum(*_take(part, query, key, value), bias, False, scale)
            total = torch.logaddexp(log_sum[part.queries], more[0].T)
            merged[part.queries] *= (log_sum[part.queries] - total).exp()[..., None]
            merged[part.queries] += output[0].transpose(0, 1) * (more[0].T - total).exp()[..., None]
            log_sum[part.queries] = total
            randoms.append(random)
        if sinks is not None:
            merged, log_sum = add_sinks(merged, log_sum, sinks)
        merged = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, merged, log_sum)
        ctx.tree, ctx.own_biases, ctx.parts, ctx.scale, ctx.randoms = tree, own_biases, parts, scale, randoms
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, log_sum = ctx.saved_tensors
        tree, randoms = ctx.tree, iter(ctx.randoms)
        batches = zip(
            _split(tree, query, key, value), tree.unpack_filled(gradient, 0.0), tree.unpack_filled(output, 0.0),
            tree.unpack_filled(log_sum, torch.inf), ctx.own_biases, strict=True,
        )  # fmt: skip
        of_queries, of_keys, of_values = [], [], []
        for batch, part_gradient, part_output, part_sum, bias in batches:
            part_sum = part_sum.transpose(1, 2).contiguous()
            for gradients, x in zip(
                (of_queries, of_keys, of_values),
                attend_backward(
                    part_gradient.transpose(1, 2), *batch, bias, bias is None, ctx.scale,
                    Attended(part_output.transpose(1, 2), part_sum, next(randoms)),
                ),
                strict=True,
            ):  # fmt: skip
                gradients.append(x.transpose(1, 2).flatten(0, 1))
        for_query = torch.cat(of_queries).index_select(0, tree.slots)
        for_key, for_value = (torch.cat(x).index_select(0, tree.own_keys) for x in (of_keys, of_values))
        for part, bias in ctx.parts:
            queries, keys = part.queries, part.keys
            part_gradients = attend_backward(
                gradient[queries].transpose(0, 1)[None], *_take(part, query, key, value), bias, False, ctx.scale,
                Attended(
                    output[queries].transpose(0, 1)[None], log_sum[queries].T[None].contiguous(), next(randoms)
                ),
            )  # fmt: skip
            for total, places, x in zip(
                (for_query, for_key, for_value), (queries, keys, keys), part_gradients, strict=True
            ):
                total[places] += x[0].transpose(0, 1)
        for_sinks = None
        if sinks is not None:
            for_sinks = compute_sink_gradients(gradient, output, log_sum, sinks).sum(0).to(sinks.dtype)
        return for_query, for_key, for_value, for_sinks, None, None, None, None


def _split(tree: PackedTree, query: Tensor, key: Tensor, value: Tensor) -> Iterator[_Triple]:
    """Yield the query, key and value [segments, heads, length, size] of each bucket of segments."""

    def take(x: Tensor, index: Tensor, shape: tuple[int, int]) -> Tensor:
        return x.index_select(0, index).unflatten(0, shape).transpose(1, 2)

    for bucket in tree.buckets:
        yield (
            take(query, bucket.queries, bucket.query_shape),
            take(key, bucket.keys, bucket.key_shape),
            take(value, bucket.keys, bucket.key_shape),
        )


def _take(part: AttentionPart, query: Tensor, key: Tensor, value: Tensor) -> _Triple:
    """Return the query, key and value [1, heads, length, size] of a part."""

    def take(x: Tensor, places: slice) -> Tensor:
        return x[places].transpose(0, 1)[None]

    return take(query, part.queries), take(key, part.keys), take(value, part.keys)

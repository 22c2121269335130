"""The differentiable core with a sampling filter: `VocabParallelStats` over the tokens that top-k and top-p keep."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.logprobs.kernels.torch import LOWEST_EXPONENT
from rl_megatron.logprobs.sampling_filter import filter_thresholds
from rl_megatron.logprobs.vocab_parallel import (
    Kernels,
    Merged,
    Upstream,
    VocabShard,
    differentiate_once,
    load_saved,
    merge,
    read_logits,
)


class FilteredStats(torch.autograd.Function):
    """(logprobs [N], entropy [N] or None, gathered [N, K] or None) under the softmax of the tokens that are kept.

    The kernels leave out tokens below the thresholds, which are constants in the gradient. If a target is below its
    row's threshold, the rank that has it corrects its statistics here: with outside="keep" it adds the target,
    otherwise it sets the target's logit x_y to −inf.
    """

    @staticmethod
    def forward(
        ctx, logits, targets, gather_ids, temperature, ignored, shard, entropy, kernels, overwrite, sampling_filter
    ):
        """Compute the thresholds and the statistics, and merge them over the ranks."""
        thresholds = filter_thresholds(logits, sampling_filter, shard, temperature, ~ignored)
        columns = kernels.local_columns(targets, shard.start, shard.num_columns)
        gather_columns = gathered = None
        stats = kernels.row_stats(logits, columns, shard.num_columns, temperature, entropy, ~ignored, thresholds)
        below = _find_below(logits, columns[:, None], thresholds, shard, kernels)[:, 0]
        kept = below if sampling_filter.outside == "keep" else None
        if kept is None:
            stats[:, 3].masked_fill_(below, -torch.inf)
        else:
            stats = torch.where(kept[:, None], _add_target(stats), stats)
        if gather_ids is not None:
            gather_columns = kernels.local_columns(gather_ids, shard.start, shard.num_columns)
            lost = _find_below(logits, gather_columns, thresholds, shard, kernels)
            if kept is not None:
                lost &= gather_ids != targets[:, None]
            gathered = read_logits(logits, gather_columns, temperature, shard, kernels).masked_fill(lost, -torch.inf)
            if shard.is_parallel:
                dist.all_reduce(gathered, group=shard.group)
        merged = merge(stats, gathered, targets, gather_ids, ignored, shard, entropy, kernels)

        lost = torch.zeros_like(ignored) if kept is not None else merged.logprobs == -torch.inf
        if sampling_filter.outside == "ignore":
            merged = _leave_out(merged, lost & merged.active)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            logits, columns, gather_columns, temperature, thresholds, merged.row_max, merged.log_sum, merged.entropy,
            merged.active, lost, None if gathered is None else merged.gathered == -torch.inf, kept,
            None if kept is None else merged.logprobs.clone(),
        )  # fmt: skip
        ctx.shard, ctx.kernels, ctx.overwrite, ctx.consumed = shard, kernels, overwrite, False
        return merged.logprobs, merged.entropy, merged.gathered

    @staticmethod
    @differentiate_once
    def backward(ctx, target_grad, entropy_grad, gathered_grads):
        """Return the gradient of the logits, in their own buffer if it may be overwritten."""
        unused = (None,) * 9
        if target_grad is None and entropy_grad is None and gathered_grads is None:
            return None, *unused
        (
            logits, columns, gather_columns, temperature, thresholds, row_max, log_sum, entropy,
            active, lost, gathered_lost, kept, logprobs,
        ) = load_saved(ctx, "vocab_parallel_logprobs")  # fmt: skip
        target_grad = None if target_grad is None else target_grad.masked_fill(lost, 0.0)
        gathered_grads = None if gathered_grads is None else gathered_grads.masked_fill(gathered_lost, 0.0)
        upstream = Upstream.from_gradients(
            target_grad, entropy_grad, gathered_grads, columns, gather_columns, entropy, active, ctx.kernels
        )
        if kept is not None:
            share = _kept_target_gradient(upstream, logprobs, kept)
            upstream = upstream._replace(
                columns=torch.cat([upstream.columns, columns[:, None]], dim=1),
                column_grads=torch.cat([upstream.column_grads, share[:, None]], dim=1),
            )
        out = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        ctx.kernels.write_row_gradients(
            out, logits.detach(), ctx.shard.num_columns, temperature, row_max, log_sum, *upstream, thresholds
        )
        ctx.consumed = ctx.overwrite
        return out, *unused


def _find_below(
    logits: Float[Tensor, "rows vocab_local"],
    columns: Int[Tensor, "rows ids"],
    thresholds: Float[Tensor, " rows"],
    shard: VocabShard,
    kernels: Kernels,
) -> Bool[Tensor, "rows ids"]:
    """Return which of K local columns per row the filter leaves out; false for ids of other ranks."""
    return (columns >= 0) & (read_logits(logits, columns, None, shard, kernels) < thresholds[:, None])


def _add_target(stats: Float[Tensor, "rows 4"]) -> Float[Tensor, "rows 4"]:
    """Return `row_stats` (m, s, t, x_y) with x_y added to the logits that m, s and t are computed from."""
    m, s, t, x = stats.unbind(-1)
    row_max = torch.maximum(m, x)
    finite = row_max.masked_fill(row_max == -torch.inf, 0.0)
    moved, apart = (m - finite).masked_fill(s == 0, 0.0), x - finite
    scale, weight = moved.exp(), apart.exp()
    shifted = scale * (t + moved * s) + weight * apart.clamp(min=LOWEST_EXPONENT)
    return torch.stack([row_max, scale * s + weight, shifted, x], dim=-1)


def _kept_target_gradient(
    upstream: Upstream, logprobs: Float[Tensor, " rows"], kept: Bool[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Return p_y·(A − g_H·ℓ_y), the part of a kept target's gradient that kernels leave out: they set p_y to 0."""
    share = upstream.base
    if upstream.entropy_grad is not None:
        share = share - upstream.entropy_grad * logprobs.clamp(min=LOWEST_EXPONENT)
    return torch.where(kept, logprobs.exp() * share, 0.0)


def _leave_out(merged: Merged, lost: Bool[Tensor, " rows"]) -> Merged:
    """Return the results with the values that rows in `lost` would have if their targets were `ignore_index`."""
    entropy, gathered = merged.entropy, merged.gathered
    return merged._replace(
        logprobs=merged.logprobs.masked_fill(lost, 0.0),
        entropy=None if entropy is None else entropy.masked_fill(lost, 0.0),
        gathered=None if gathered is None else gathered.masked_fill(lost[:, None], 0.0),
        active=merged.active & ~lost,
    )

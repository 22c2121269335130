"""The differentiable core: local statistics, one collective, a backward that turns the logits into their gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


class Kernels(NamedTuple):
    """The functions of a backend; `kernels/torch.py` states the contract of each."""

    row_stats: Callable[..., Tensor]
    write_row_gradients: Callable[..., None]
    gather_columns: Callable[..., Tensor]


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns: global ids [start, stop), of which those below `vocab_size` (None: all) exist."""

    start: int
    stop: int
    vocab_size: int | None
    group: dist.ProcessGroup | None

    @property
    def num_columns(self) -> int:
        """Local columns that exist; the rest is padding."""
        stop = self.stop if self.vocab_size is None else min(self.stop, self.vocab_size)
        return max(0, stop - self.start)

    @property
    def is_parallel(self) -> bool:
        return self.group is not None and dist.get_world_size(self.group) > 1

    def columns(self, ids: Int[Tensor, "*tokens"]) -> Int[Tensor, "*tokens"]:
        """Return the local columns of global ids, −1 if this rank does not own them."""
        local = ids - self.start
        return local.masked_fill((local < 0) | (local >= self.num_columns), -1)


def check(condition: Bool[Tensor, ""], describe: Callable[[], str]) -> None:
    """Raise ValueError on a CPU, where the answer is at hand. A GPU asserts asynchronously, so that nothing waits."""
    if condition.device.type != "cpu":
        torch._assert_async(condition)  # pyright: ignore[reportPrivateImportUsage]  # torch has no public one
    elif not condition:
        raise ValueError(describe())


class VocabParallelStats(torch.autograd.Function):
    """(logprobs [N], entropy [N] or None, gathered [N, K] or None) of logits [N, V_local]; formulas in `api.py`."""

    @staticmethod
    def forward(ctx, logits, targets, gather_ids, temperature, ignored, shard, entropy, kernels, overwrite):
        columns = shard.columns(targets)
        stats = kernels.row_stats(logits, columns, shard.num_columns, temperature, entropy, ~ignored)
        gather_columns = gathered = None
        if gather_ids is not None:
            gather_columns = shard.columns(gather_ids)
            gathered = gathered_logits(logits, gather_columns, temperature, shard, kernels)
        found = merge(stats, gathered, targets, gather_ids, ignored, shard, entropy)

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            logits, columns, gather_columns, temperature, found.row_max, found.log_sum, found.entropy, found.active
        )
        ctx.shard, ctx.kernels, ctx.overwrite, ctx.consumed = shard, kernels, overwrite, False
        return found.logprobs, found.entropy, found.gathered

    @staticmethod
    @once_differentiable
    def backward(ctx, target_grad, entropy_grad, gathered_grads):
        unused = (None,) * 8
        if target_grad is None and entropy_grad is None and gathered_grads is None:
            return None, *unused
        logits, columns, gather_columns, temperature, row_max, log_sum, entropy, active = saved(
            ctx, "vocab_parallel_logprobs"
        )
        upstream = Upstream.of(target_grad, entropy_grad, gathered_grads, columns, gather_columns, entropy, active)
        out = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        ctx.kernels.write_row_gradients(
            out, logits.detach(), ctx.shard.num_columns, temperature, row_max, log_sum, *upstream
        )
        ctx.consumed = ctx.overwrite
        return out, *unused


def gathered_logits(
    logits: Float[Tensor, "rows vocab_local"],
    columns: Int[Tensor, "rows ids"],
    temperature: Float[Tensor, " rows"] | None,
    shard: VocabShard,
    kernels: Kernels,
) -> Float[Tensor, "rows ids"]:
    """Return x at K ids per row, [N, K]: each id has one owner, the other ranks add 0; one all-reduce."""
    x = own_logits(logits, columns, temperature, shard, kernels)
    if shard.is_parallel:
        dist.all_reduce(x, group=shard.group)
    return x


def own_logits(
    logits: Float[Tensor, "rows vocab_local"],
    columns: Int[Tensor, "rows ids"],
    temperature: Float[Tensor, " rows"] | None,
    shard: VocabShard,
    kernels: Kernels,
) -> Float[Tensor, "rows ids"]:
    """Return x at K local columns per row, 0 if another rank has the id."""
    if shard.num_columns:
        return kernels.gather_columns(logits, columns, temperature)
    return logits.new_zeros(columns.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


class Merged(NamedTuple):
    """Results of N rows, the same on every rank, and what their backward needs.

    M and log s are kept apart: their sum would lose log s under a large shift.
    """

    logprobs: Float[Tensor, " rows"]
    entropy: Float[Tensor, " rows"] | None
    gathered: Float[Tensor, "rows ids"] | None
    row_max: Float[Tensor, " rows"]  # M, 0 where it is −inf
    log_sum: Float[Tensor, " rows"]
    active: Bool[Tensor, " rows"]  # rows that may have a gradient


def merge(
    stats: Float[Tensor, "rows 4"],
    gathered: Float[Tensor, "rows ids"] | None,
    targets: Int[Tensor, " rows"],
    gather_ids: Int[Tensor, "rows ids"] | None,
    ignored: Bool[Tensor, " rows"],
    shard: VocabShard,
    entropy: bool,
) -> Merged:
    """Return the rows' results, from this rank's `row_stats` and all ranks' `gathered_logits`; one all-gather."""
    parts, ranges = _all_shards(stats, shard)
    _check_ids(targets, gather_ids, ignored, ranges, shard)
    row_max, sums, shifted_sums, target_x = _merge(parts)

    empty = sums == 0  # every logit of the row is −inf: defined as logprob −inf, entropy 0, gradient 0
    row_max = row_max.masked_fill(empty, 0.0)
    log_sum = sums.masked_fill(empty, 1.0).log()
    logprobs = ((target_x - row_max) - log_sum).masked_fill(empty, -torch.inf).masked_fill(ignored, 0.0)
    row_entropy = (log_sum - shifted_sums / sums).masked_fill(empty | ignored, 0.0) if entropy else None
    if gathered is not None:
        gathered = ((gathered - row_max[:, None]) - log_sum[:, None]).masked_fill(empty[:, None], -torch.inf)
        gathered = gathered.masked_fill(ignored[:, None], 0.0)
    return Merged(logprobs, row_entropy, gathered, row_max, log_sum, ~(ignored | empty))


class Upstream(NamedTuple):
    """The last arguments of `write_row_gradients`: what the gradients of the results say of the logits'."""

    base: Float[Tensor, " rows"]
    entropy_grad: Float[Tensor, " rows"] | None
    columns: Int[Tensor, "rows targets"]
    column_grads: Float[Tensor, "rows targets"]
    active: Bool[Tensor, " rows"]

    @classmethod
    def of(
        cls,
        target_grad: Float[Tensor, " rows"] | None,
        entropy_grad: Float[Tensor, " rows"] | None,
        gathered_grads: Float[Tensor, "rows ids"] | None,
        columns: Int[Tensor, " rows"],
        gather_columns: Int[Tensor, "rows ids"] | None,
        entropy: Float[Tensor, " rows"] | None,
        active: Bool[Tensor, " rows"],
    ) -> Upstream:
        """Return them, given the gradients of logprobs, entropy and gathered: None if nobody asks, but one is given."""
        grads, all_columns = [], []
        if target_grad is not None:
            grads.append(target_grad[:, None])
            all_columns.append(columns[:, None])
        if gathered_grads is not None:
            assert gather_columns is not None
            grads.append(gathered_grads)
            all_columns.append(gather_columns)
        if grads:
            column_grads, named_columns = torch.cat(grads, dim=1), torch.cat(all_columns, dim=1)
        else:
            assert entropy_grad is not None
            column_grads = entropy_grad.new_zeros(entropy_grad.shape[0], 0)
            named_columns = columns.new_zeros(columns.shape[0], 0)
        base = -column_grads.sum(dim=1)
        touched = (column_grads != 0).any(dim=1)  # rows nobody asks about are written as zeros without being read
        if entropy_grad is not None:
            assert entropy is not None
            base = base - entropy_grad * entropy
            touched |= entropy_grad != 0
        return cls(base, entropy_grad, named_columns, column_grads, active & touched)

    def rows(self, rows: slice) -> Upstream:
        """Return what they say of some of the rows."""
        return Upstream(
            self.base[rows],
            None if self.entropy_grad is None else self.entropy_grad[rows],
            self.columns[rows],
            self.column_grads[rows],
            self.active[rows],
        )


def saved(ctx, operator: str) -> tuple[Tensor, ...]:
    """Return `ctx.saved_tensors` of an operator that turns logits into their gradient.

    Raises: RuntimeError naming the operator where the logits are no longer what they were.
    """
    if ctx.consumed:
        raise RuntimeError(
            f"second backward through {operator}: the first one turned the logits' buffer into their gradient. Sum the "
            "losses and call backward once, or run the forward pass again."
        )
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):  # a leaf's second backward without retain_graph: autograd says so itself
            raise
        raise RuntimeError(
            f"the logits given to {operator} were modified before its backward pass: something wrote into them, or a "
            "second consumer's backward turned the same buffer into its gradient. Hand the other consumer a copy; "
            "several statistics of one logits tensor come in one call (entropy=True, gather_ids=…)."
        ) from error


def _all_shards(
    stats: Float[Tensor, "rows 4"], shard: VocabShard
) -> tuple[Float[Tensor, "tp rows 4"], Float[Tensor, "tp 2"]]:
    """Return every rank's statistics [tp, N, 4] in rank order, and their (start, stop) [tp, 2], in one all-gather.

    The ranges ride along as one more row: shards that overlap or leave a gap, and targets that nobody owns, are then
    found without another collective.
    """
    ranges = stats.new_tensor([[shard.start, shard.stop, 0, 0]])
    if not shard.is_parallel:
        return stats[None], ranges[:, :2]
    packed = torch.cat([stats, ranges])
    parts = packed.new_empty(dist.get_world_size(shard.group), *packed.shape)
    dist.all_gather(list(parts.unbind(0)), packed, group=shard.group)
    return parts[:, :-1], parts[:, -1, :2]


def _merge(parts: Float[Tensor, "tp rows 4"]) -> tuple[Float[Tensor, " rows"], ...]:
    """Return (M, s, t, x_y) of the whole vocabulary, summed in rank order, hence bitwise the same on every rank:

        M = max_r m_r,  w_r = e^{m_r−M},  s = Σ_r w_r·s_r,  t = Σ_r w_r·(t_r + (m_r−M)·s_r),  x_y = Σ_r x_y,r
    """
    m, s, t, target_x = parts.unbind(-1)
    row_max = m.amax(dim=0)
    shift = m - row_max.masked_fill(row_max == -torch.inf, 0.0)
    weights = shift.exp()
    shifted = weights * (t + shift.masked_fill(s == 0, 0.0) * s)  # an empty shard's shift is −inf: no 0 · (−inf)
    return row_max, (weights * s).sum(dim=0), shifted.sum(dim=0), target_x.sum(dim=0)


def _check_ids(
    targets: Int[Tensor, " rows"],
    gather_ids: Int[Tensor, "rows ids"] | None,
    ignored: Bool[Tensor, " rows"],
    ranges: Float[Tensor, "tp 2"],
    shard: VocabShard,
) -> None:
    starts, stops = ranges.long().unbind(-1)
    check(
        (starts[1:] == stops[:-1]).all() & (starts[0] == 0),
        lambda: f"vocabulary shards must tile [0, V) in rank order, got (start, stop) {ranges.long().tolist()}",
    )
    vocab_size = stops[-1] if shard.vocab_size is None else stops[-1].clamp(max=shard.vocab_size)
    ids = targets[:, None] if gather_ids is None else torch.cat([targets[:, None], gather_ids], dim=1)
    valid = ((ids >= 0) & (ids < vocab_size)) | ignored[:, None]
    check(
        valid.all(),
        lambda: (
            f"id {ids[~valid][0].item()} among the targets or gather_ids is neither in the vocabulary "
            f"[0, {vocab_size.item()}) nor ignored"
        ),
    )

"""The differentiable core of `vocab_parallel_logprobs`: local statistics, a collective, and a backward in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.topology.collectives import gather_from_ranks


class Kernels(NamedTuple):
    """The functions of a backend. `kernels/torch.py` documents the contract of each."""

    row_stats: Callable[..., Tensor]
    write_row_gradients: Callable[..., None]
    gather_columns: Callable[..., Tensor]
    local_columns: Callable[..., Tensor]
    merge_rows: Callable[..., tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]]
    target_slopes: Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class VocabShard:
    """This rank's columns of the vocabulary.

    Attributes:
        start: The first global id of this rank.
        stop: One past the last global id of this rank, including padding.
        vocab_size: Ids from this one on are padding; None: no id is.
        group: The group over which the vocabulary is sharded, or None.
    """

    start: int
    stop: int
    vocab_size: int | None
    group: dist.ProcessGroup | None

    @property
    def num_columns(self) -> int:
        """Return the number of local columns that are not padding."""
        stop = self.stop if self.vocab_size is None else min(self.stop, self.vocab_size)
        return max(0, stop - self.start)

    @property
    def is_parallel(self) -> bool:
        """Return whether the vocabulary is sharded over more than one rank."""
        return self.group is not None and dist.get_world_size(self.group) > 1


def check(condition: Bool[Tensor, ""], describe: Callable[[], str]) -> None:
    """Check a condition that is a tensor. On a GPU the check is an asynchronous assertion, so the host does not wait.

    Args:
        condition: The condition, a scalar.
        describe: Returns the message. It is called only on a CPU, and only if the condition is false.

    Raises:
        ValueError: The condition is false, on a CPU.
    """
    if condition.device.type != "cpu":
        torch._assert_async(condition)  # pyright: ignore[reportPrivateImportUsage]  # torch has no public assertion
    elif not condition:
        raise ValueError(describe())


def differentiate_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's `once_differentiable(backward)`, typed so that it can override `Function.backward`."""
    return once_differentiable(backward)


class VocabParallelStats(torch.autograd.Function):
    """(logprobs [N], entropy [N] or None, gathered [N, K] or None) of logits [N, V_local]; see `api.py`."""

    @staticmethod
    def forward(ctx, logits, targets, gather_ids, temperature, ignored, shard, entropy, kernels, overwrite):
        """Compute this rank's statistics, and merge them over the ranks."""
        columns = kernels.local_columns(targets, shard.start, shard.num_columns)
        stats = kernels.row_stats(logits, columns, shard.num_columns, temperature, entropy, ~ignored)
        gather_columns = gathered = None
        if gather_ids is not None:
            gather_columns = kernels.local_columns(gather_ids, shard.start, shard.num_columns)
            gathered = gather_logits(logits, gather_columns, temperature, shard, kernels)
        merged = merge(stats, gathered, targets, gather_ids, ignored, shard, entropy, kernels)

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            logits, columns, gather_columns, temperature, merged.row_max, merged.log_sum, merged.entropy, merged.active
        )
        ctx.shard, ctx.kernels, ctx.overwrite, ctx.consumed = shard, kernels, overwrite, False
        return merged.logprobs, merged.entropy, merged.gathered

    @staticmethod
    @differentiate_once
    def backward(ctx, target_grad, entropy_grad, gathered_grads):
        """Return the gradient of the logits, in their own buffer if it may be overwritten."""
        unused = (None,) * 8
        if target_grad is None and entropy_grad is None and gathered_grads is None:
            return None, *unused
        logits, columns, gather_columns, temperature, row_max, log_sum, entropy, active = load_saved(
            ctx, "vocab_parallel_logprobs"
        )
        upstream = Upstream.from_gradients(
            target_grad, entropy_grad, gathered_grads, columns, gather_columns, entropy, active, ctx.kernels
        )
        out = logits.detach() if ctx.overwrite else torch.empty_like(logits)
        ctx.kernels.write_row_gradients(
            out, logits.detach(), ctx.shard.num_columns, temperature, row_max, log_sum, *upstream
        )
        ctx.consumed = ctx.overwrite
        return out, *unused


def gather_logits(
    logits: Float[Tensor, "rows vocab_local"],
    columns: Int[Tensor, "rows ids"],
    temperature: Float[Tensor, " rows"] | None,
    shard: VocabShard,
    kernels: Kernels,
) -> Float[Tensor, "rows ids"]:
    """Return logits / T at K ids per row, [N, K], with one all-reduce: ranks that lack an id add 0."""
    x = read_logits(logits, columns, temperature, shard, kernels)
    if shard.is_parallel:
        dist.all_reduce(x, group=shard.group)
    return x


def read_logits(
    logits: Float[Tensor, "rows vocab_local"],
    columns: Int[Tensor, "rows ids"],
    temperature: Float[Tensor, " rows"] | None,
    shard: VocabShard,
    kernels: Kernels,
) -> Float[Tensor, "rows ids"]:
    """Return logits / T at K local columns per row, or 0 for ids that another rank has."""
    if shard.num_columns:
        return kernels.gather_columns(logits, columns, temperature)
    return logits.new_zeros(columns.shape, dtype=torch.promote_types(logits.dtype, torch.float32))


class Merged(NamedTuple):
    """The results of N rows, the same on every rank, and the statistics that backward needs.

    M and log s are separate, because their sum would lose the precision of log s if M is large.

    Attributes:
        logprobs: The logprobs of the targets.
        entropy: The entropies, or None.
        gathered: The logprobs of the gathered ids, or None.
        row_max: M, or 0 if M is −inf.
        log_sum: log s.
        active: The rows that may have a gradient.
    """

    logprobs: Float[Tensor, " rows"]
    entropy: Float[Tensor, " rows"] | None
    gathered: Float[Tensor, "rows ids"] | None
    row_max: Float[Tensor, " rows"]
    log_sum: Float[Tensor, " rows"]
    active: Bool[Tensor, " rows"]


def merge(
    stats: Float[Tensor, "rows 4"],
    gathered: Float[Tensor, "rows ids"] | None,
    targets: Int[Tensor, " rows"],
    gather_ids: Int[Tensor, "rows ids"] | None,
    ignored: Bool[Tensor, " rows"],
    shard: VocabShard,
    entropy: bool,
    kernels: Kernels,
) -> Merged:
    """Merge the statistics of all ranks, with one all-gather, and return the results of the rows.

    Args:
        stats: This rank's `row_stats`.
        gathered: The result of `gather_logits`, or None.
        targets: The targets' global ids.
        gather_ids: The gathered global ids, or None.
        ignored: The rows to leave out.
        shard: This rank's shard of the vocabulary.
        entropy: Whether to compute the entropy.
        kernels: The functions of a backend.

    Raises:
        ValueError: Shards do not tile the vocabulary, or an id is outside it (on a GPU, see `check`).
    """
    parts, ranges = _gather_shards(stats, shard)
    _check_ids(targets, gather_ids, ignored, ranges, shard)
    logprobs, row_entropy, row_max, log_sum, active = kernels.merge_rows(parts, ignored, entropy)
    if gathered is not None:
        empty = ~(active | ignored)[:, None]
        gathered = ((gathered - row_max[:, None]) - log_sum[:, None]).masked_fill(empty, -torch.inf)
        gathered = gathered.masked_fill(ignored[:, None], 0.0)
    return Merged(logprobs, row_entropy, gathered, row_max, log_sum, active)


class Upstream(NamedTuple):
    """The last arguments of `write_row_gradients`, computed from the upstream gradients of the results.

    Attributes:
        base: A, [N].
        entropy_grad: g_H, [N], or None.
        columns: The local columns that have a gradient of their own, [N, J].
        column_grads: Their gradients, [N, J].
        active: The rows that have a gradient, [N].
    """

    base: Float[Tensor, " rows"]
    entropy_grad: Float[Tensor, " rows"] | None
    columns: Int[Tensor, "rows targets"]
    column_grads: Float[Tensor, "rows targets"]
    active: Bool[Tensor, " rows"]

    @classmethod
    def from_gradients(
        cls,
        target_grad: Float[Tensor, " rows"] | None,
        entropy_grad: Float[Tensor, " rows"] | None,
        gathered_grads: Float[Tensor, "rows ids"] | None,
        columns: Int[Tensor, " rows"],
        gather_columns: Int[Tensor, "rows ids"] | None,
        entropy: Float[Tensor, " rows"] | None,
        active: Bool[Tensor, " rows"],
        kernels: Kernels,
    ) -> Upstream:
        """Return the arguments from the upstream gradients of the results. At least one gradient must not be None.

        Args:
            target_grad: The gradient of the logprobs, or None.
            entropy_grad: The gradient of the entropies, or None.
            gathered_grads: The gradient of the gathered logprobs, or None.
            columns: The local columns of the targets.
            gather_columns: The local columns of the gathered ids, or None.
            entropy: The entropies, or None.
            active: The rows that may have a gradient.
            kernels: The functions of a backend.
        """
        if gathered_grads is None and target_grad is not None:
            base, active = kernels.target_slopes(target_grad, entropy_grad, entropy, active)
            return cls(base, entropy_grad, columns[:, None], target_grad[:, None], active)
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
        touched = (column_grads != 0).any(dim=1)  # rows without upstream gradient get gradient 0, even if they have NaN
        if entropy_grad is not None:
            assert entropy is not None
            base = base - entropy_grad * entropy
            touched |= entropy_grad != 0
        return cls(base, entropy_grad, named_columns, column_grads, active & touched)

    def select_rows(self, rows: slice) -> Upstream:
        return Upstream(
            self.base[rows],
            None if self.entropy_grad is None else self.entropy_grad[rows],
            self.columns[rows],
            self.column_grads[rows],
            self.active[rows],
        )


def load_saved(ctx, operator: str) -> tuple[Tensor, ...]:
    """Return `ctx.saved_tensors` of an operator that overwrites logits with their gradient.

    If they have been overwritten already, the error names the operator.
    """
    if ctx.consumed:
        raise RuntimeError(
            f"second backward through {operator}: the first one overwrote the logits with their gradient. Sum the "
            "losses and call backward once, or run the forward pass again."
        )
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace" not in str(error):  # for a second backward without retain_graph, autograd's own message is clear
            raise
        raise RuntimeError(
            f"the logits given to {operator} were modified before its backward pass: an operation wrote into them, or "
            "the backward of a second operator overwrote them with its gradient. Give the second operator a clone; to "
            "get several statistics of the same logits, use one call (entropy=True, gather_ids=…)."
        ) from error


def _gather_shards(
    stats: Float[Tensor, "rows 4"], shard: VocabShard
) -> tuple[Float[Tensor, "tp rows 4"], Float[Tensor, "tp 2"] | None]:
    """Return all ranks' statistics [tp, N, 4] in rank order, and the ranges [tp, 2] of their shards (None: one rank).

    One all-gather sends both, with the range (start, stop) as one more row. Shards that overlap or leave a gap, and
    targets that no rank has, are then found without another collective.
    """
    if not shard.is_parallel:
        return stats[None], None
    ranges = stats.new_zeros(1, 4)
    ranges[0, 0].fill_(shard.start)  # `new_tensor` would copy from the host, and wait for the device
    ranges[0, 1].fill_(shard.stop)
    parts = gather_from_ranks(torch.cat([stats, ranges]), shard.group)
    return parts[:, :-1], parts[:, -1, :2]


def _check_ids(
    targets: Int[Tensor, " rows"],
    gather_ids: Int[Tensor, "rows ids"] | None,
    ignored: Bool[Tensor, " rows"],
    ranges: Float[Tensor, "tp 2"] | None,
    shard: VocabShard,
) -> None:
    """Check that shards tile the vocabulary, and that it has the targets and gather_ids of all rows not ignored."""
    if ranges is None:
        vocab_size = shard.num_columns
    else:
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
            f"id {ids[~valid][0].item()} among the targets or gather_ids must be in the vocabulary, "
            f"[0, {int(vocab_size)}), or ignored"
        ),
    )

"""The two kernels in plain torch: statistics of each row in one read, and its gradient in one read and one write.

Both process blocks of rows in fp32 scratch tiles, so that no buffer of the logits' size is allocated. On a CPU, the
tiles fit in the cache. A row's arithmetic does not depend on its block, so results have the same bits in every batch.
fp64 logits are processed in fp64, which the gradient checks use.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.logprobs.kernels.tiles import exponentials, row_blocks, row_sums, scratch_tiles

# e to this power is exactly 0 in fp32 and fp64. Log-probabilities are clamped to it from below to avoid 0 · (−inf).
LOWEST_EXPONENT = -1000.0


def row_stats(
    logits: Float[Tensor, "rows vocab_local"],
    columns: Int[Tensor, " rows"],
    num_columns: int,
    temperature: Float[Tensor, " rows"] | None,
    entropy: bool,
    active: Bool[Tensor, " rows"],
    threshold: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows 4"]:
    """Return the statistics (m, s, t, x_y) of each row of this rank's shard, [N, 4], in one pass, with x = logits / T.

        m = max_v x_v,  s = Σ_v e^{x_v−m},  t = Σ_v e^{x_v−m}·(x_v−m),  x_y = x at the target's column

    t is shifted by m like s, because Σ e^x·x would lose precision by cancellation. A shard that is empty or has only
    −inf gives (−inf, 0, 0, x_y). All are in nats.

    Args:
        logits: [N, V_local].
        columns: The target's local column of each row, [N]; −1 if another rank has it, which gives x_y = 0.
        num_columns: The number of columns that are in the vocabulary, at most V_local. The others are padding.
        temperature: T of each row, [N], or None for 1.
        entropy: Whether t is needed; otherwise it is 0.
        active: [N]. The results of inactive rows are undefined, because some of these rows are skipped.
        threshold: [N] in fp32, or None. Logits below it (before the division by T) count as −inf in m, s and t.
    """
    num_rows = logits.shape[0]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    stats = logits.new_zeros(num_rows, 4, dtype=dtype)
    stats[:, 0] = -torch.inf
    if num_columns == 0 or num_rows == 0:
        return stats
    stats[:, 3] = gather_columns(logits, columns[:, None], temperature)[:, 0]
    blocks = row_blocks(active, num_columns)
    tile, spare = scratch_tiles(2, blocks, num_columns, dtype, logits.device)
    for rows, skip in blocks:
        if skip:
            continue
        x = _load(logits[rows, :num_columns], temperature, threshold, rows, tile)
        row_max = x.amax(dim=-1)
        # A row with only −inf cannot be shifted by its maximum. It is shifted by 0, so that its sums are exactly 0.
        x.sub_(row_max.masked_fill(row_max == -torch.inf, 0.0)[:, None])
        stats[rows, 0] = row_max
        if entropy:
            weights = exponentials(x, out=spare[: x.shape[0]])
            stats[rows, 1] = row_sums(spare, x.shape[0])
            weights.mul_(x.clamp_(min=LOWEST_EXPONENT))
            stats[rows, 2] = row_sums(spare, x.shape[0])
        else:
            exponentials(x, out=x)
            stats[rows, 1] = row_sums(tile, x.shape[0])
    return stats


def write_row_gradients(
    out: Float[Tensor, "rows vocab_local"],
    logits: Float[Tensor, "rows vocab_local"],
    num_columns: int,
    temperature: Float[Tensor, " rows"] | None,
    row_max: Float[Tensor, " rows"],
    log_sum: Float[Tensor, " rows"],
    base: Float[Tensor, " rows"],
    entropy_grad: Float[Tensor, " rows"] | None,
    columns: Int[Tensor, "rows targets"],
    column_grads: Float[Tensor, "rows targets"],
    active: Bool[Tensor, " rows"],
    threshold: Float[Tensor, " rows"] | None = None,
) -> None:
    """Write dL/dlogits into `out`, which may be `logits` itself.

        dz_v = (1/T)·[ p_v·(A − g_H·ℓ_v) + Σ_j g_j·1[v = column_j] ],   ℓ_v = (x_v−M) − log s,  p_v = e^{ℓ_v}

    In columns from num_columns on, and in inactive rows, `out` is exactly 0, even if a logit is NaN.

    Args:
        out: The gradient to write, [N, V_local].
        logits: [N, V_local].
        num_columns: The number of columns that are in the vocabulary.
        temperature: T of each row, [N], or None for 1.
        row_max: M, [N].
        log_sum: log s, [N].
        base: A, [N].
        entropy_grad: g_H, [N], or None for 0.
        columns: [N, J] local columns that have a gradient of their own; −1 if another rank has the column. If a column
            is given twice, its gradients are added.
        column_grads: g_j, [N, J].
        active: [N], the rows that have a gradient.
        threshold: [N] or None. p_v is 0 if the logit is below it (see `row_stats`).
    """
    out[:, num_columns:].zero_()
    if num_columns == 0:
        return
    column_grads = column_grads.masked_fill(columns < 0, 0.0)
    columns = columns.clamp(min=0)
    if temperature is not None:
        base = base / temperature
        entropy_grad = None if entropy_grad is None else entropy_grad / temperature
        column_grads = column_grads / temperature[:, None]
    blocks = row_blocks(active, num_columns)
    tile, spare = scratch_tiles(2, blocks, num_columns, base.dtype, logits.device)
    for rows, skip in blocks:
        target = out[rows, :num_columns]
        if skip:
            target.zero_()
            continue
        x = _load(logits[rows, :num_columns], temperature, threshold, rows, tile)
        x.sub_(row_max[rows, None])
        if entropy_grad is None:
            gradient = exponentials(x, out=x).mul_((base[rows] / log_sum[rows].exp())[:, None])
        else:
            x.sub_(log_sum[rows, None])
            gradient = exponentials(x, out=spare[: x.shape[0]])
            gradient.mul_(x.clamp_(min=LOWEST_EXPONENT).mul_(entropy_grad[rows, None].neg()).add_(base[rows, None]))
        gradient.scatter_add_(1, columns[rows], column_grads[rows])
        _zero_rows(gradient, ~active[rows])
        target.copy_(gradient)  # the only rounding to the logits' dtype


def gather_columns(
    logits: Float[Tensor, "rows vocab_local"],
    columns: Int[Tensor, "rows ids"],
    temperature: Float[Tensor, " rows"] | None,
) -> Float[Tensor, "rows ids"]:
    """Return x = logits / T at the given local columns, or 0 for column −1, which stands for another rank's column.

    Shapes: logits [N, V_local] with V_local > 0; columns [N, J]; temperature [N] or None for 1. Returns [N, J] in fp32
    (fp64 for fp64 logits).
    """
    x = logits.gather(1, columns.clamp(min=0)).to(torch.promote_types(logits.dtype, torch.float32))
    if temperature is not None:
        x = x / temperature[:, None]
    return x.masked_fill(columns < 0, 0.0)


def _load(block: Tensor, temperature: Tensor | None, threshold: Tensor | None, rows: slice, tile: Tensor) -> Tensor:
    """Return the block, copied into the tile, with −inf below the threshold and divided by the temperature.

    The division comes after the conversion, because a quotient in the logits' dtype would be rounded.
    """
    x = tile[: block.shape[0]].copy_(block)
    if threshold is not None:
        x.masked_fill_(x < threshold[rows, None], -torch.inf)
    return x if temperature is None else x.div_(temperature[rows, None])


def _zero_rows(gradient: Tensor, inactive: Tensor) -> None:
    """Set inactive rows to 0. On a GPU all rows are written, because the host would wait for the indices of these."""
    if inactive.device.type != "cpu":
        gradient.masked_fill_(inactive[:, None], 0.0)
    elif inactive.any():
        gradient.index_fill_(0, inactive.nonzero()[:, 0], 0.0)


def local_columns(ids: Int[Tensor, "*tokens"], start: int, num_columns: int) -> Int[Tensor, "*tokens"]:
    """Return the local columns of global ids, or −1 for ids that another rank has.

    Args:
        ids: The ids.
        start: This rank's first id.
        num_columns: The number of its columns that are in the vocabulary.
    """
    local = ids - start
    return local.masked_fill((local < 0) | (local >= num_columns), -1)


def merge_rows(
    parts: Float[Tensor, "tp rows 4"], ignored: Bool[Tensor, " rows"], entropy: bool
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"] | None, Tensor, Tensor, Bool[Tensor, " rows"]]:
    """Return (logprobs, entropies or None, M, log s, active) of the whole vocabulary, from every rank's `row_stats`.

        M = max_r m_r,  w_r = e^{m_r−M},  s = Σ_r w_r·s_r,  t = Σ_r w_r·(t_r + (m_r−M)·s_r),  x_y = Σ_r x_y,r
        log p = (x_y − M) − log s,  H = log s − t/s

    Sums are in rank order, so that the results are bitwise the same on every rank. A row with only −inf has logprob
    −inf, entropy 0 and M = 0, and is not active.

    Args:
        parts: The statistics of all ranks.
        ignored: The rows to leave out: their logprob and entropy are 0, and they are not active.
        entropy: Whether to compute the entropy.
    """
    m, sums, shifted_sums, target_x = parts.unbind(-1)
    row_max = m.amax(dim=0)
    shift = m - row_max.masked_fill(row_max == -torch.inf, 0.0)
    weights = shift.exp()
    s, x = (weights * sums).sum(dim=0), target_x.sum(dim=0)
    empty = s == 0
    row_max = row_max.masked_fill(empty, 0.0)
    log_sum = s.masked_fill(empty, 1.0).log()
    logprobs = ((x - row_max) - log_sum).masked_fill(empty, -torch.inf).masked_fill(ignored, 0.0)
    row_entropy = None
    if entropy:
        # An empty shard has shift −inf and s = 0, whose product would be NaN.
        t = (weights * (shifted_sums + shift.masked_fill(sums == 0, 0.0) * sums)).sum(dim=0)
        row_entropy = (log_sum - t / s).masked_fill(empty | ignored, 0.0)
    return logprobs, row_entropy, row_max, log_sum, ~(ignored | empty)


def target_slopes(
    target_grad: Float[Tensor, " rows"],
    entropy_grad: Float[Tensor, " rows"] | None,
    entropy: Float[Tensor, " rows"] | None,
    active: Bool[Tensor, " rows"],
) -> tuple[Float[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """Return A = −g − g_H·H and whether the row has a gradient, from the gradients g and g_H of logprob and entropy.

    Args:
        target_grad: g, [N].
        entropy_grad: g_H, [N], or None for 0.
        entropy: H, [N], or None.
        active: The rows that may have a gradient, [N]. The result is false for the others, and for rows whose g and g_H
            are 0.
    """
    base, touched = -target_grad, target_grad != 0
    if entropy_grad is not None:
        assert entropy is not None
        base = base - entropy_grad * entropy
        touched = touched | (entropy_grad != 0)
    return base, active & touched

"""The two kernels in plain torch: statistics of each row in one read, its gradient in one read and one write.

Both walk over blocks of rows through fp32 scratch tiles that fit in the cache on a CPU, so that nothing of the logits'
size is ever allocated. A row's arithmetic never depends on its block: results are the same bits whatever the batch.
fp64 logits keep fp64 throughout, which is what the gradient checks use.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.logprobs.kernels.tiles import exponentials, row_blocks, row_sums, scratch_tiles

# e to this power is exactly 0 in fp32 and fp64. Log-probabilities are raised to it so that 0 · (−inf) never happens.
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
    """Return one-pass statistics of this rank's shard, per row, with x = logits / T:

        m = max_v x_v,  s = Σ_v e^{x_v−m},  t = Σ_v e^{x_v−m}·(x_v−m),  x_y = x at the target's column

    t is shifted by m like s: Σ e^x·x would cancel. An empty or all −inf shard gives (−inf, 0, 0, x_y).

    Shapes: logits [N, V_local]; columns [N] local target column, −1 where another rank owns it (x_y is then 0);
        num_columns ≤ V_local, the columns that exist in the vocabulary; temperature [N] or None for 1; active [N] bool:
        inactive rows are garbage to the caller and are skipped where that is free; threshold [N] fp32 or None: logits
        below it, before the temperature, count as −inf in m, s and t. Returns [N, 4] as (m, s, t, x_y).
    Units: nats. `t` is 0 unless `entropy`.
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
        x = _scaled(logits[rows, :num_columns], temperature, threshold, rows, tile)
        row_max = x.amax(dim=-1)
        # An all −inf row has no shift that makes it finite; 0 leaves it at −inf and its sums at exactly 0.
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
    """Write dL/dlogits into `out`, which may be `logits` itself. With ℓ_v = (x_v−M) − log s and p_v = e^{ℓ_v}:

        dz_v = (1/T)·[ p_v·(A − g_H·ℓ_v) + Σ_j g_j·1[v = column_j] ]

    Columns from num_columns on, and inactive rows, get exactly 0 and are never read (NaN there stays without effect).

    Shapes: out, logits [N, V_local]; row_max (M), log_sum (log s), base (A) [N]; entropy_grad (g_H) [N] or None;
        columns, column_grads [N, J], column −1 where another rank owns it; duplicates add up; active [N] bool;
        threshold [N] or None: p_v = 0 where the logit is below it (see `row_stats`).
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
        x = _scaled(logits[rows, :num_columns], temperature, threshold, rows, tile)
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
    """Return x at the given local columns, 0 if the column is −1 (another rank's).

    Shapes: logits [N, V_local > 0]; columns [N, J]; temperature [N] or None. Returns [N, J] in fp32 (fp64 for fp64).
    """
    x = logits.gather(1, columns.clamp(min=0)).to(torch.promote_types(logits.dtype, torch.float32))
    if temperature is not None:
        x = x / temperature[:, None]
    return x.masked_fill(columns < 0, 0.0)


def _scaled(block: Tensor, temperature: Tensor | None, threshold: Tensor | None, rows: slice, tile: Tensor) -> Tensor:
    """Return the block in the tile's dtype, −inf below the threshold, divided by the temperature.

    In the logits' dtype the quotient would be rounded.
    """
    x = tile[: block.shape[0]].copy_(block)
    if threshold is not None:
        x.masked_fill_(x < threshold[rows, None], -torch.inf)
    return x if temperature is None else x.div_(temperature[rows, None])


def _zero_rows(gradient: Tensor, inactive: Tensor) -> None:
    """Set inactive rows to 0. A CPU visits these rows alone; a GPU would have to wait to know which they are."""
    if inactive.device.type != "cpu":
        gradient.masked_fill_(inactive[:, None], 0.0)
    elif inactive.any():
        gradient.index_fill_(0, inactive.nonzero()[:, 0], 0.0)

"""The two kernels in plain torch: statistics of each row in one read, its gradient in one read and one write.

Both walk over blocks of rows through fp32 scratch tiles that fit in the cache on a CPU, so that nothing of the logits'
size is ever allocated. A row's arithmetic never depends on its block: results are the same bits whatever the batch.
fp64 logits keep fp64 throughout, which is what the gradient checks use.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Two tiles of this many elements are alive at a time: 4 MiB each in fp32 on a CPU (its last cache; smaller ones spend
# their time on starting operations), 128 MiB on a GPU (full waves).
TILE_ELEMENTS_CPU = 1 << 20
TILE_ELEMENTS_CUDA = 1 << 25

# Rows between two blocks are left out where they have this many elements, a sixteenth of a tile; fewer are cheaper to
# compute along than to step around.
SKIPPED_ELEMENTS = 1 << 16

# e to this power is exactly 0 in fp32 and fp64. Log-probabilities are raised to it so that 0 · (−inf) never happens.
LOWEST_EXPONENT = -1000.0


def row_stats(
    logits: Tensor,
    columns: Tensor,
    num_columns: int,
    temperature: Tensor | None,
    entropy: bool,
    active: Tensor,
    threshold: Tensor | None = None,
) -> Tensor:
    """One-pass statistics of this rank's shard, per row, with x = logits / T:

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
    tile, spare = _two_tiles(logits, blocks, num_columns, dtype)
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
    out: Tensor,
    logits: Tensor,
    num_columns: int,
    temperature: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    base: Tensor,
    entropy_grad: Tensor | None,
    columns: Tensor,
    column_grads: Tensor,
    active: Tensor,
    threshold: Tensor | None = None,
) -> None:
    """Writes dL/dlogits into `out`, which may be `logits` itself. With ℓ_v = (x_v−M) − log s and p_v = e^{ℓ_v}:

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
    tile, spare = _two_tiles(logits, blocks, num_columns, base.dtype)
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


def gather_columns(logits: Tensor, columns: Tensor, temperature: Tensor | None) -> Tensor:
    """x at the given local columns, 0 where the column is −1 (another rank's).

    Shapes: logits [N, V_local > 0]; columns [N, J]; temperature [N] or None. Returns [N, J] in fp32 (fp64 for fp64).
    """
    x = logits.gather(1, columns.clamp(min=0)).to(torch.promote_types(logits.dtype, torch.float32))
    if temperature is not None:
        x = x / temperature[:, None]
    return x.masked_fill(columns < 0, 0.0)


def row_blocks(active: Tensor, num_columns: int) -> list[tuple[slice, bool]]:
    """Slices of consecutive rows that fill a tile, each with whether all its rows are inactive.

    On a GPU that question would cost a synchronisation, so there every block counts as active.
    """
    tile_elements = TILE_ELEMENTS_CPU if active.device.type == "cpu" else TILE_ELEMENTS_CUDA
    size = max(1, tile_elements // num_columns)
    blocks = []
    for start, stop, skip in _stretches(active, num_columns):
        step = stop - start if skip else size
        blocks += [(slice(first, min(first + step, stop)), skip) for first in range(start, stop, step)]
    return blocks


def _stretches(active: Tensor, num_columns: int) -> list[tuple[int, int, bool]]:
    """(start, stop, skip) of consecutive rows, cut at every run of inactive rows that is worth skipping."""
    num_rows = active.shape[0]
    if active.device.type != "cpu":
        return [(0, num_rows, False)]
    values, counts = torch.unique_consecutive(active, return_counts=True)
    stretches, start = [], 0
    for is_active, count in zip(values.tolist(), counts.tolist(), strict=True):
        skip = not is_active and (count * num_columns >= SKIPPED_ELEMENTS or count == num_rows)
        if stretches and not skip and not stretches[-1][2]:
            stretches[-1] = (stretches[-1][0], start + count, False)
        else:
            stretches.append((start, start + count, skip))
        start += count
    return stretches


def _two_tiles(logits: Tensor, blocks: list[tuple[slice, bool]], num_columns: int, dtype: torch.dtype) -> Tensor:
    """Scratch memory for x and for its exponential, allocated once: page faults would double the time. Two rows at
    least, for `row_sums`."""
    tallest = max((rows.stop - rows.start for rows, skip in blocks if not skip), default=0)
    return torch.empty(2, max(2, tallest), num_columns, dtype=dtype, device=logits.device)


def _scaled(block: Tensor, temperature: Tensor | None, threshold: Tensor | None, rows: slice, tile: Tensor) -> Tensor:
    """The block in the tile's dtype, −inf below the threshold, divided by the temperature there (in the logits' dtype
    it would be rounded)."""
    x = tile[: block.shape[0]].copy_(block)
    if threshold is not None:
        x.masked_fill_(x < threshold[rows, None], -torch.inf)
    return x if temperature is None else x.div_(temperature[rows, None])


def exponentials(x: Tensor, out: Tensor) -> Tensor:
    """e^x into `out`, which may be x. In fp32 as 2^{x·log2 e}, three times as fast on some CPUs: x ≤ 0 is rounded once
    more, by as much as when the row's maximum was taken from it. fp64 keeps its own."""
    if x.dtype == torch.float64:
        return torch.exp(x, out=out)
    return torch.mul(x, 1 / math.log(2), out=out).exp2_()


def row_sums(tile: Tensor, num_rows: int) -> Tensor:
    """Sums of the tile's first rows. Torch splits the sum of one row alone between its threads, and so rounds it
    otherwise than among others: then the tile's next row, whatever it holds, keeps it company."""
    return tile[: max(2, num_rows)].sum(dim=-1)[:num_rows]


def _zero_rows(gradient: Tensor, inactive: Tensor) -> None:
    """On a CPU the rows alone are visited; on a GPU asking which they are would make it wait."""
    if inactive.device.type != "cpu":
        gradient.masked_fill_(inactive[:, None], 0.0)
    elif inactive.any():
        gradient.index_fill_(0, inactive.nonzero()[:, 0], 0.0)

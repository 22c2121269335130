"""Blocks of rows and the fp32 scratch memory in which they are processed.

The bits of a row's result do not depend on other rows. On a CPU, torch vectorises an operation except for the last few
numbers of each thread's part, which it computes one by one. The two ways may round differently, so that a result's bits
depend on its position. The functions here avoid this.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# The elements of a scratch tile. On a CPU a tile has 4 MiB in fp32, so that two fit the last-level cache; with smaller
# tiles, launching operations would take most of the time. On a GPU it has 128 MiB, which is enough to keep all
# multiprocessors busy.
TILE_ELEMENTS_CPU = 1 << 20
TILE_ELEMENTS_CUDA = 1 << 25

# A run of inactive rows is skipped if it has at least this many elements, a sixteenth of a CPU's tile. It is cheaper to
# compute a shorter run than to split a block for it.
SKIPPED_ELEMENTS = 1 << 16

# The most numbers that one step of torch's vectorised loops processes, and the size below which torch uses one thread.
_VECTOR = 32
_GRAIN = 32768


def row_blocks(active: Bool[Tensor, " rows"], num_columns: int) -> list[tuple[slice, bool]]:
    """Return (rows, skip) of consecutive blocks: rows that fit in a tile, or a run of inactive rows to skip.

    On a GPU no rows are skipped, because the host would have to wait to find inactive rows.
    """
    tile_elements = TILE_ELEMENTS_CPU if active.device.type == "cpu" else TILE_ELEMENTS_CUDA
    size = max(1, tile_elements // num_columns)
    blocks = []
    for start, stop, skip in _stretches(active, num_columns):
        step = stop - start if skip else size
        blocks += [(slice(first, min(first + step, stop)), skip) for first in range(start, stop, step)]
    return blocks


def _stretches(active: Bool[Tensor, " rows"], num_columns: int) -> list[tuple[int, int, bool]]:
    """Return (start, stop, skip) of consecutive runs of rows, split at inactive runs that are worth skipping."""
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


def scratch_tiles(
    count: int, blocks: list[tuple[slice, bool]], num_columns: int, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "{count} height {num_columns}"]:
    """Return `count` tiles, at least as tall as the tallest block that is not skipped.

    They are allocated once, because page faults of repeated allocations would double the time. For `exponentials`, the
    row stride on a CPU is a multiple of `_VECTOR` times the number of threads. For `row_sums`, a tile has at least two
    rows.
    """
    tallest = max((rows.stop - rows.start for rows, skip in blocks if not skip), default=0)
    width = num_columns
    if device.type == "cpu":
        alignment = _VECTOR * torch.get_num_threads()
        width = -(-num_columns // alignment) * alignment
    height = max(2, tallest, _rows_for_all_threads(width, device))
    return torch.empty(count, height, width, dtype=dtype, device=device)[:, :, :num_columns]


def _rows_for_all_threads(width: int, device: torch.device) -> int:
    """Return how many rows of `width` numbers keep every thread busy. With fewer, torch splits the work differently."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return 1 if threads == 1 else -(-threads * _GRAIN // width)


def exponentials(x: Float[Tensor, "rows columns"], out: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Write e^x into `out` and return it. Both are the first rows of scratch tiles, and may be the same.

    In fp32, 2^{x·log2 e} is computed, which is three times as fast on some CPUs. x was rounded when the row's maximum
    was subtracted; the multiplication by log2 e rounds it again, by as much. The padding between rows is computed too,
    and further rows until every thread has a part. Each part then ends at the end of a vector, so that every number is
    vectorised.
    """
    if x.dtype == torch.float64:
        return torch.exp(x, out=out)
    torch.mul(_with_padding(x), 1 / math.log(2), out=_with_padding(out)).exp2_()
    return out


def _with_padding(x: Tensor) -> Tensor:
    """Return a tile's first rows, with their padding and enough further rows for all threads, as a 1-D tensor."""
    width = x.stride(0)
    return x.as_strided((max(x.shape[0], _rows_for_all_threads(width, x.device)) * width,), (1,))


def row_sums(tile: Float[Tensor, "height columns"], num_rows: int) -> Float[Tensor, " {num_rows}"]:
    """Return the sums of the tile's first rows.

    Torch splits the sum of a single row between its threads, which rounds differently from the sum of one of several
    rows. A single row is therefore summed together with the tile's next row, whose sum is dropped.
    """
    return tile[: max(2, num_rows)].sum(dim=-1)[:num_rows]

"""Blocks of rows and the fp32 scratch memory they are worked on in, with arithmetic that no other row can change.

Torch vectorises an operation on a CPU but for the last few numbers of each thread's part, which it computes one by one;
where both ways round differently, a number's bits depend on where it stands. Here they do not.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Two tiles of this many elements are alive at a time: 4 MiB each in fp32 on a CPU (its last cache; smaller ones spend
# their time on starting operations), 128 MiB on a GPU (full waves).
TILE_ELEMENTS_CPU = 1 << 20
TILE_ELEMENTS_CUDA = 1 << 25

# Rows between two blocks are left out where they have this many elements, a sixteenth of a tile; fewer are cheaper to
# compute along than to step around.
SKIPPED_ELEMENTS = 1 << 16

# Numbers that torch's vectorised loops take at a time, at most; and those below which it does not call on its threads.
_VECTOR = 32
_GRAIN = 32768


def row_blocks(active: Bool[Tensor, " rows"], num_columns: int) -> list[tuple[slice, bool]]:
    """Return slices of consecutive rows that fill a tile, each with whether all its rows are inactive.

    On a GPU that question would cost a synchronisation, so there every block counts as active.
    """
    tile_elements = TILE_ELEMENTS_CPU if active.device.type == "cpu" else TILE_ELEMENTS_CUDA
    size = max(1, tile_elements // num_columns)
    blocks = []
    for start, stop, skip in _stretches(active, num_columns):
        step = stop - start if skip else size
        blocks += [(slice(first, min(first + step, stop)), skip) for first in range(start, stop, step)]
    return blocks


def _stretches(active: Bool[Tensor, " rows"], num_columns: int) -> list[tuple[int, int, bool]]:
    """Return (start, stop, skip) of consecutive rows, cut at every run of inactive rows that is worth skipping."""
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
    """Return `count` tiles as tall as the tallest block, allocated once: page faults would double the time.

    Rows lie a multiple of `_VECTOR` apart for every thread, for `exponentials`; there are at least two, for `row_sums`.
    """
    tallest = max((rows.stop - rows.start for rows, skip in blocks if not skip), default=0)
    width = num_columns
    if device.type == "cpu":
        unit = _VECTOR * torch.get_num_threads()
        width = -(-num_columns // unit) * unit
    height = max(2, tallest, _rows_for_all_threads(width, device))
    return torch.empty(count, height, width, dtype=dtype, device=device)[:, :, :num_columns]


def _rows_for_all_threads(width: int, device: torch.device) -> int:
    """Return how many rows of `width` numbers keep every thread busy: torch would split fewer at other places."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return 1 if threads == 1 else -(-threads * _GRAIN // width)


def exponentials(
    x: Float[Tensor, "rows columns"], out: Float[Tensor, "rows columns"]
) -> Float[Tensor, "rows columns"]:
    """Write e^x into `out` and return it; `out` may be x, and both are the first rows of a scratch tile.

    In fp32 it is 2^{x·log2 e}, three times as fast on some CPUs: x ≤ 0 is rounded once more, by as much as when the
    row's maximum was taken from it. Padding between rows is computed along, and rows until all threads have some: each
    thread's part then ends where vectors end, and every number is computed in the vectorised way.
    """
    if x.dtype == torch.float64:
        return torch.exp(x, out=out)
    torch.mul(_with_padding(x), 1 / math.log(2), out=_with_padding(out)).exp2_()
    return out


def _with_padding(x: Tensor) -> Tensor:
    width = x.stride(0)
    return x.as_strided((max(x.shape[0], _rows_for_all_threads(width, x.device)) * width,), (1,))


def row_sums(tile: Float[Tensor, "height columns"], num_rows: int) -> Float[Tensor, " {num_rows}"]:
    """Return sums of the tile's first rows. Torch splits the sum of one row alone between its threads, and so rounds it
    otherwise than among others: then the tile's next row, whatever it holds, keeps it company."""
    return tile[: max(2, num_rows)].sum(dim=-1)[:num_rows]

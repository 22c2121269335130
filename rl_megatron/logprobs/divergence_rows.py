"""The arithmetic of `divergence.py` in plain torch: statistics of pairs of rows, their merge, and the gradients.

As in `kernels/torch.py`, blocks of rows are processed in fp32 scratch tiles, and no row's result depends on other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.logprobs.kernels.tiles import exponentials, row_blocks, row_sums, scratch_tiles

Divergence = Literal["cross_entropy", "forward", "reverse"]


class Pairs(NamedTuple):
    """The N rows of a student, each with a teacher row. x is student / T, and y is teacher / T.

    Attributes:
        student: The student's logits, [N, V_local].
        teacher: The teacher's logits, [M, V_local].
        rows: The index of each student row's teacher row, in [0, M).
        temperature: T of each student row, or None for 1.
        num_columns: Columns from this one on are padding.
    """

    student: Float[Tensor, "rows vocab_local"]
    teacher: Float[Tensor, "teacher_rows vocab_local"]
    rows: Int[Tensor, " rows"]
    temperature: Float[Tensor, " rows"] | None
    num_columns: int

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the arithmetic: fp32, or fp64 if one of the models has fp64 logits."""
        return torch.promote_types(torch.promote_types(self.student.dtype, self.teacher.dtype), torch.float32)

    def load(self, block: slice, x: Float[Tensor, "block columns"], y: Float[Tensor, "block columns"]) -> None:
        """Write x and y of a block of student rows into two tiles."""
        x.copy_(self.student[block, : self.num_columns])
        y.copy_(self.teacher[:, : self.num_columns].index_select(0, self.rows[block]))
        if self.temperature is not None:
            x.div_(self.temperature[block, None])
            y.div_(self.temperature[block, None])


def pair_stats(
    pairs: Pairs, divergences: Sequence[Divergence], active: Bool[Tensor, " rows"]
) -> Float[Tensor, "rows statistics"]:
    """Return each row's statistics (m, s, m', s', u, …) on this rank, [N, 4+D], with one u for each divergence.

        m = max_v x_v,  s = Σ_v e^{x_v−m},  m' and s' likewise of y
        u = Σ_v w_v·d_v:   cross_entropy w = e^{y−m'}, d = −(x−m);   forward w = e^{y−m'}, d = (y−m')−(x−m);
                           reverse w = e^{x−m}, d = (x−m)−(y−m')

    If a shard is empty or has only −inf, m is −inf, s is 0, and d has x − 0 instead of x − m. The results of inactive
    rows are undefined, because some of these rows are skipped.
    """
    num_columns, num_rows = pairs.num_columns, pairs.student.shape[0]
    stats = pairs.student.new_zeros(num_rows, 4 + len(divergences), dtype=pairs.dtype)
    stats[:, [0, 2]] = -torch.inf
    if num_columns == 0 or num_rows == 0:
        return stats
    blocks = row_blocks(active, num_columns)
    tiles = scratch_tiles(2 + len(divergences), blocks, num_columns, pairs.dtype, pairs.student.device)
    for block, skip in blocks:
        if skip:
            continue
        height = block.stop - block.start
        x, y, *products = tiles[:, :height]
        pairs.load(block, x, y)
        row_max, teacher_max = _shift_by_max(x), _shift_by_max(y)
        for divergence, product in zip(divergences, products, strict=True):
            if divergence == "cross_entropy":
                torch.neg(x, out=product)
            else:
                torch.sub(*((y, x) if divergence == "forward" else (x, y)), out=product)
        exponentials(x, out=x)
        exponentials(y, out=y)
        for divergence, product in zip(divergences, products, strict=True):
            weights = x if divergence == "reverse" else y
            product.mul_(weights).masked_fill_(weights == 0, 0.0)  # an id with weight 0 adds 0, not 0 · ∞ = NaN
        sums = (row_sums(tile, height) for tile in tiles)
        columns = (0, 2, 1, 3, *range(4, 4 + len(divergences)))
        for column, values in zip(columns, (row_max, teacher_max, *sums), strict=True):
            stats[block, column] = values
    return stats


def merge_pairs(
    parts: Float[Tensor, "tp rows statistics"], divergences: Sequence[Divergence]
) -> tuple[Float[Tensor, " rows"], ...]:
    """Return (M, s, M', s', u, …) of the whole vocabulary, from every rank's statistics.

        M = max_r m_r,  s = Σ_r e^{m_r−M}·s_r,  M' and s' likewise
        u = Σ_r e^{a_r−A}·(u_r + ((a_r−A) − (b_r−B))·s_{a,r}),   for the cross-entropy without (a_r−A)

    a and A stand for m and M of the model whose probabilities weight the sum, b and B for those of the other model.
    Sums are in rank order, so that the results are bitwise the same on every rank. The maximum of a row with only −inf
    is returned as 0.
    """
    student, teacher = (parts[..., 0], parts[..., 1]), (parts[..., 2], parts[..., 3])
    row_max, teacher_max = _finite(student[0].amax(dim=0)), _finite(teacher[0].amax(dim=0))
    shifts = student[0] - row_max, teacher[0] - teacher_max
    sums, teacher_sums = (
        (shift.exp() * s).sum(dim=0) for shift, s in zip(shifts, (student[1], teacher[1]), strict=True)
    )
    merged = []
    for index, divergence in enumerate(divergences):
        if divergence == "reverse":
            (shift, weighing), (other_shift, other) = (shifts[0], student[1]), (shifts[1], teacher[1])
        else:
            (shift, weighing), (other_shift, other) = (shifts[1], teacher[1]), (shifts[0], student[1])
        moved = -other_shift.masked_fill(other == 0, 0.0)  # `pair_stats` used x − 0 for a shard with only −inf
        if divergence != "cross_entropy":
            moved = moved + shift
        weights = shift.exp()
        products = torch.where(weights > 0, weights * (parts[..., 4 + index] + moved * weighing), 0.0)
        merged.append(products.sum(dim=0))
    return row_max, sums, teacher_max, teacher_sums, *merged


class Normalisers(NamedTuple):
    """M, log s, M' and log s' of each pair of rows, [N]."""

    row_max: Float[Tensor, " rows"]
    log_sum: Float[Tensor, " rows"]
    teacher_max: Float[Tensor, " rows"]
    teacher_log_sum: Float[Tensor, " rows"]


def write_pair_gradients(
    out: Float[Tensor, "rows vocab_local"],
    pairs: Pairs,
    normalisers: Normalisers,
    kl: Float[Tensor, " rows"] | None,
    grad: Float[Tensor, " rows"],
    active: Bool[Tensor, " rows"],
) -> None:
    """Write g·∂/∂student of each row's divergence into `out`, which may be the student itself.

        ∂/∂student = (1/T)·(q − p),  or for the reverse KL  (1/T)·q·((ln q − ln p) − KL)
        ln q = (x−M)−log s,  ln p = (y−M')−log s'

    In rows that are not active, and in columns from num_columns on, `out` is exactly 0, even if a logit is NaN.

    Args:
        out: The gradient to write, [N, V_local].
        pairs: The rows of both models.
        normalisers: M, log s, M' and log s'.
        kl: The reverse KL of each row; None for the other two divergences.
        grad: The upstream gradient g of each row.
        active: The rows that have a gradient.
    """
    num_columns = pairs.num_columns
    out[:, num_columns:].zero_()
    if num_columns == 0:
        return
    if pairs.temperature is not None:
        grad = grad / pairs.temperature
    blocks = row_blocks(active, num_columns)
    tiles = scratch_tiles(2, blocks, num_columns, pairs.dtype, pairs.student.device)
    for block, skip in blocks:
        target = out[block, :num_columns]
        if skip:
            target.zero_()
            continue
        x, y = tiles[:, : block.stop - block.start]
        pairs.load(block, x, y)
        row_max, log_sum, teacher_max, teacher_log_sum = (values[block, None] for values in normalisers)
        x.sub_(row_max).sub_(log_sum)
        y.sub_(teacher_max).sub_(teacher_log_sum)
        if kl is None:
            exponentials(x, out=x).sub_(exponentials(y, out=y))
        else:
            torch.sub(x, y, out=y).sub_(kl[block, None])
            impossible = exponentials(x, out=x) == 0
            x.mul_(y).masked_fill_(impossible, 0.0)
        x.mul_(grad[block, None]).masked_fill_(~active[block, None], 0.0)
        target.copy_(x)  # the only rounding to the student's dtype


def _shift_by_max(x: Tensor) -> Tensor:
    """Subtract from each row its maximum, in place, unless it is −inf. Return the maxima."""
    row_max = x.amax(dim=-1)
    x.sub_(_finite(row_max)[:, None])
    return row_max


def _finite(row_max: Tensor) -> Tensor:
    """Return the maxima, with 0 for −inf: a row with only −inf is shifted by 0, so that its sums are exactly 0."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)

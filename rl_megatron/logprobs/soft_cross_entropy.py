"""`vocab_parallel_soft_cross_entropy`: one model's distribution against another's, over logits that stay sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.logprobs.reference import row_blocks
from rl_megatron.logprobs.rows import belongs_to_a_leaf, from_rows, memory_order, to_rows
from rl_megatron.logprobs.vocab_parallel import VocabShard, check, saved


def vocab_parallel_soft_cross_entropy(
    student_logits: Tensor,
    teacher_logits: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    *,
    teacher_rows: Tensor | None = None,
    valid_vocab_size: int | None = None,
) -> Tensor:
    """−Σ_v p(v)·log q(v) of a student q = softmax(x) and a constant teacher p = softmax(y), per row of the student:

        M = max_v x_v,  s = Σ_v e^{x_v−M},  M' = max_v y_v,  s' = Σ_v e^{y_v−M'},  u = Σ_v e^{y_v−M'}·(x_v−M)
        CE = log s − u/s'        ∂CE/∂x = q − p

    over the whole vocabulary, whose columns both models shard alike over `tp_group`, equally and in rank order.
    Forward: one read of both, one all-gather of 20 bytes per row and rank. Backward: no collective, one read of both,
    one write. Nothing of the logits' size is allocated: rows are worked on in blocks, in fp32 and rounded once to the
    student's dtype, and the student's buffer turns into its gradient, with the guards of `vocab_parallel_logprobs`.

    Rows whose teacher row is −1 have CE 0 and gradient exactly 0, whatever their logits, NaN included. A student that
    gives −inf to what its teacher finds possible has CE ∞; its gradient q − p stays finite. Where either row is nothing
    but −inf the gradient is 0, and a teacher of nothing but −inf asks for nothing: CE 0.

    Shapes: student_logits [..., V_local]; teacher_logits [*, V_local], its leading shape flattened giving the rows that
        teacher_rows [...] counts (default: each student row meets the teacher row at its own place). Returns [...].
    Units: nats.
    Args: valid_vocab_size: ids from here on are padding; they enter no softmax and no gradient.
    Raises: ValueError for shapes that do not fit and for rows that the teacher does not have.
    Source: Hinton, Vinyals & Dean 2015, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531), eq. 2 at
        temperature 1; statistics merged across shards as in `vocab_parallel_logprobs`.
    """
    leading, num_local = student_logits.shape[:-1], student_logits.shape[-1]
    if teacher_logits.shape[-1] != num_local:
        raise ValueError(
            f"teacher_logits {tuple(teacher_logits.shape)} must shard the vocabulary like student_logits "
            f"{tuple(student_logits.shape)}: {num_local} columns on this rank"
        )
    if (teacher_logits.shape[:-1] if teacher_rows is None else teacher_rows.shape) != leading:
        name, given = ("teacher_logits", teacher_logits) if teacher_rows is None else ("teacher_rows", teacher_rows)
        raise ValueError(
            f"{name} {tuple(given.shape)} must have student_logits' leading shape, {tuple(student_logits.shape)}"
        )
    order, teacher_order = memory_order(student_logits), memory_order(teacher_logits)
    student, teacher = to_rows(student_logits, order), to_rows(teacher_logits.detach(), teacher_order)
    # The row in memory of each teacher row.
    in_memory = torch.arange(teacher.shape[0], device=teacher.device)
    in_memory = from_rows(in_memory, teacher_logits.shape[:-1], teacher_order)
    if teacher_rows is None:
        rows = in_memory
    else:
        check(
            ((teacher_rows >= -1) & (teacher_rows < teacher.shape[0])).all(),
            lambda: f"teacher_rows {teacher_rows.min()} … {teacher_rows.max()} of a teacher with {len(teacher)} rows",
        )
        found = in_memory.flatten().index_select(0, teacher_rows.clamp(min=0).flatten())
        rows = found.view_as(teacher_rows).masked_fill(teacher_rows < 0, -1)
    start = num_local * (0 if tp_group is None else dist.get_rank(tp_group))
    shard = VocabShard(start, start + num_local, valid_vocab_size, tp_group)
    result = _SoftCrossEntropy.apply(
        student, teacher, to_rows(rows[..., None], order)[:, 0], shard, not belongs_to_a_leaf(student)
    )
    return from_rows(result, leading, order)


class _SoftCrossEntropy(torch.autograd.Function):
    """[N] from student [N, V_local] and teacher [M, V_local] logits and the teacher's row for each of the student's."""

    @staticmethod
    def forward(ctx, student, teacher, rows, shard, overwrite):
        active = rows >= 0
        rows = rows.clamp(min=0)
        stats = _row_stats(student, teacher, rows, shard.num_columns, active)
        row_max, sums, teacher_max, teacher_sums, products = _merge(_all_shards(stats, shard))

        empty, teacher_empty = sums == 0, teacher_sums == 0  # every logit of the row is −inf
        log_sum = sums.masked_fill(empty, 1.0).log()
        teacher_log_sum = teacher_sums.masked_fill(teacher_empty, 1.0).log()
        result = log_sum - products / teacher_sums.masked_fill(teacher_empty, 1.0)

        ctx.save_for_backward(
            student, teacher, rows, row_max, log_sum, teacher_max, teacher_log_sum, active & ~empty & ~teacher_empty
        )
        ctx.num_columns, ctx.overwrite, ctx.consumed = shard.num_columns, overwrite, False
        return result.masked_fill(teacher_empty | ~active, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        student, teacher, rows, row_max, log_sum, teacher_max, teacher_log_sum, active = saved(
            ctx, "vocab_parallel_soft_cross_entropy"
        )
        out = student.detach() if ctx.overwrite else torch.empty_like(student)
        _write_row_gradients(
            out, student.detach(), teacher, rows, ctx.num_columns, row_max, log_sum, teacher_max, teacher_log_sum,
            grad, active & (grad != 0),
        )  # fmt: skip
        ctx.consumed = ctx.overwrite
        return out, None, None, None, None


def _row_stats(student: Tensor, teacher: Tensor, rows: Tensor, num_columns: int, active: Tensor) -> Tensor:
    """(m, s, m', s', u) of this rank's shard, [N, 5]: the docstring's sums with this shard's own maxima. An empty or
    all −inf shard gives m = −inf and s = 0, and takes (x − 0) in u."""
    dtype = _dtype(student, teacher)
    stats = student.new_zeros(student.shape[0], 5, dtype=dtype)
    stats[:, [0, 2]] = -torch.inf
    if num_columns == 0 or student.shape[0] == 0:
        return stats
    blocks = row_blocks(active, num_columns)
    tiles = _tiles(3, blocks, num_columns, student, dtype)
    for block, skip in blocks:
        if skip:
            continue
        x, y, product = (tile[: block.stop - block.start] for tile in tiles)
        row_max = _shift_by_max(x.copy_(student[block, :num_columns]))
        teacher_max = _shift_by_max(y.copy_(teacher[:, :num_columns].index_select(0, rows[block])))
        weights = y.exp_()
        torch.mul(weights, x, out=product).masked_fill_(weights == 0, 0.0)  # 0 · (−inf): impossible to both
        stats[block] = torch.stack(
            [row_max, x.exp_().sum(dim=-1), teacher_max, weights.sum(dim=-1), product.sum(dim=-1)], dim=-1
        )
    return stats


def _write_row_gradients(
    out: Tensor,
    student: Tensor,
    teacher: Tensor,
    rows: Tensor,
    num_columns: int,
    row_max: Tensor,
    log_sum: Tensor,
    teacher_max: Tensor,
    teacher_log_sum: Tensor,
    grad: Tensor,
    active: Tensor,
) -> None:
    """g·(e^{(x−M)−log s} − e^{(y−M')−log s'}) into `out`, which may be `student` itself; rows not active, and columns
    from num_columns on, get exactly 0 and are never read."""
    out[:, num_columns:].zero_()
    if num_columns == 0:
        return
    blocks = row_blocks(active, num_columns)
    tiles = _tiles(2, blocks, num_columns, student, grad.dtype)
    for block, skip in blocks:
        target = out[block, :num_columns]
        if skip:
            target.zero_()
            continue
        x, y = (tile[: block.stop - block.start] for tile in tiles)
        x.copy_(student[block, :num_columns]).sub_(row_max[block, None]).sub_(log_sum[block, None]).exp_()
        y.copy_(teacher[:, :num_columns].index_select(0, rows[block]))
        y.sub_(teacher_max[block, None]).sub_(teacher_log_sum[block, None]).exp_()
        x.sub_(y).mul_(grad[block, None]).masked_fill_(~active[block, None], 0.0)
        target.copy_(x)  # the only rounding to the student's dtype


def _merge(parts: Tensor) -> tuple[Tensor, ...]:
    """(M, s, M', s', u) of the whole vocabulary, summed in rank order, hence bitwise the same on every rank:

        M = max_r m_r,  w_r = e^{m_r−M},  s = Σ_r w_r·s_r,  likewise M', w' and s',  u = Σ_r w'_r·(u_r + (m_r−M)·s'_r)

    Shapes: parts [tp, N, 5]; each result [N], maxima of nothing but −inf being 0.
    """
    m, s, teacher_m, teacher_s, u = parts.unbind(-1)
    row_max, teacher_max = (_finite(maxima.amax(dim=0)) for maxima in (m, teacher_m))
    shift = m - row_max
    weights = (teacher_m - teacher_max).exp()
    shifted = u + shift.masked_fill(s == 0, 0.0) * teacher_s  # an all −inf shard took x − 0 already
    products = torch.where(weights > 0, weights * shifted, 0.0)
    return (
        row_max, (shift.exp() * s).sum(dim=0), teacher_max, (weights * teacher_s).sum(dim=0), products.sum(dim=0)
    )  # fmt: skip


def _all_shards(stats: Tensor, shard: VocabShard) -> Tensor:
    """Every rank's statistics [tp, N, 5], in rank order."""
    if not shard.is_parallel:
        return stats[None]
    parts = stats.new_empty(dist.get_world_size(shard.group), *stats.shape)
    dist.all_gather(list(parts.unbind(0)), stats, group=shard.group)
    return parts


def _shift_by_max(x: Tensor) -> Tensor:
    """Each row's maximum, subtracted from it in place where it is finite."""
    row_max = x.amax(dim=-1)
    x.sub_(_finite(row_max)[:, None])
    return row_max


def _finite(row_max: Tensor) -> Tensor:
    """No shift makes an all −inf row finite; 0 leaves it at −inf and its sums at exactly 0."""
    return row_max.masked_fill(row_max == -torch.inf, 0.0)


def _dtype(student: Tensor, teacher: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)


def _tiles(count: int, blocks: list[tuple[slice, bool]], num_columns: int, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Scratch memory, allocated once for all blocks."""
    tallest = max((block.stop - block.start for block, _ in blocks), default=0)
    return torch.empty(count, tallest, num_columns, dtype=dtype, device=like.device)

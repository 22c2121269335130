"""How far one model's distribution is from another's, over logits that stay sharded: cross-entropy and both KLs."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.logprobs.api import row_temperature, vocab_shard
from rl_megatron.logprobs.divergence_rows import (
    Divergence,
    Normalisers,
    Pairs,
    merge_pairs,
    pair_stats,
    write_pair_gradients,
)
from rl_megatron.logprobs.flatten import from_rows, may_be_overwritten, memory_order, to_rows
from rl_megatron.logprobs.vocab_parallel import VocabShard, check, saved


def vocab_parallel_soft_cross_entropy(
    student_logits: Float[Tensor, "*tokens vocab_local"],
    teacher_logits: Float[Tensor, "*teacher_tokens vocab_local"],
    tp_group: dist.ProcessGroup | None = None,
    *,
    teacher_rows: Int[Tensor, "*tokens"] | None = None,
    valid_vocab_size: int | None = None,
) -> Float[Tensor, "*tokens"]:
    """Return −Σ_v p(v)·log q(v) of a student q = softmax(x) and a constant teacher p = softmax(y), per student row:

        M = max_v x_v,  s = Σ_v e^{x_v−M},  M' = max_v y_v,  s' = Σ_v e^{y_v−M'},  u = −Σ_v e^{y_v−M'}·(x_v−M)
        CE = log s + u/s'        ∂CE/∂x = q − p

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
    return _compare("cross_entropy", student_logits, teacher_logits, tp_group, 1.0, teacher_rows, valid_vocab_size)


def vocab_parallel_kl(
    student_logits: Float[Tensor, "*tokens vocab_local"],
    teacher_logits: Float[Tensor, "*teacher_tokens vocab_local"],
    tp_group: dist.ProcessGroup | None = None,
    *,
    direction: Literal["forward", "reverse"] = "forward",
    temperature: float | Float[Tensor, "*#tokens"] = 1.0,
    teacher_rows: Int[Tensor, "*tokens"] | None = None,
    valid_vocab_size: int | None = None,
) -> Float[Tensor, "*tokens"]:
    """Return the KL divergence of a student q = softmax(x/T) and a constant teacher p = softmax(y/T), per student row:

        forward:  KL(p‖q) = Σ_v p·(log p − log q)        ∂/∂x = (1/T)·(q − p)
        reverse:  KL(q‖p) = Σ_v q·(log q − log p)        ∂/∂x = (1/T)·q·((log q − log p) − KL)

    over the whole vocabulary. Layout, cost, memory, guards and rows without a teacher are those of
    `vocab_parallel_soft_cross_entropy`. The differences log p − log q are summed as such, so that two models that agree
    have a KL of 0 to rounding, which may be a little below 0.

    What only the weighing model finds impossible adds nothing. What only the other finds impossible makes the KL ∞:
    forward, a student at −inf where the teacher is not, whose gradient q − p stays finite; reverse, a teacher at −inf
    where the student is not, whose gradient is infinite, and is given as 0. A teacher of nothing but −inf asks for
    nothing: KL 0. A student of nothing but −inf has KL ∞. In both cases the gradient is 0.

    Shapes: as `vocab_parallel_soft_cross_entropy`; temperature a positive number, or a tensor that broadcasts to [...].
    Units: nats.
    Raises: ValueError for shapes that do not fit, rows that the teacher does not have, and another direction.
    Source: forward, Hinton et al. 2015 (arXiv:1503.02531), without the factor T² there; reverse, Gu et al. 2024,
        "MiniLLM" (arXiv:2306.08543).
    """
    if direction not in ("forward", "reverse"):
        raise ValueError(f"direction={direction!r} must be 'forward', KL(teacher‖student), or 'reverse'")
    return _compare(direction, student_logits, teacher_logits, tp_group, temperature, teacher_rows, valid_vocab_size)


def _compare(
    of: Divergence,
    student_logits: Float[Tensor, "*tokens vocab_local"],
    teacher_logits: Float[Tensor, "*teacher_tokens vocab_local"],
    tp_group: dist.ProcessGroup | None,
    temperature: float | Float[Tensor, "*#tokens"],
    teacher_rows: Int[Tensor, "*tokens"] | None,
    valid_vocab_size: int | None,
) -> Float[Tensor, "*tokens"]:
    leading, num_local = student_logits.shape[:-1], student_logits.shape[-1]
    _check_alike(student_logits, teacher_logits, teacher_rows)
    order, teacher_order = memory_order(student_logits), memory_order(teacher_logits)
    student, teacher = to_rows(student_logits, order), to_rows(teacher_logits.detach(), teacher_order)
    # The row in memory of each teacher row.
    in_memory = torch.arange(teacher.shape[0], device=teacher.device)
    rows = from_rows(in_memory, teacher_logits.shape[:-1], teacher_order)
    if teacher_rows is not None:
        check(
            ((teacher_rows >= -1) & (teacher_rows < teacher.shape[0])).all(),
            lambda: f"teacher_rows {teacher_rows.min()} … {teacher_rows.max()} of a teacher with {len(teacher)} rows",
        )
        found = rows.flatten().index_select(0, teacher_rows.clamp(min=0).flatten())
        rows = found.view_as(teacher_rows).masked_fill(teacher_rows < 0, -1)
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    result = _Divergence.apply(
        student,
        teacher,
        to_rows(rows[..., None], order)[:, 0],
        row_temperature(temperature, rows, order, dtype),
        vocab_shard(num_local, tp_group, None, valid_vocab_size),
        of,
        may_be_overwritten(student),
    )
    return from_rows(result, leading, order)


def _check_alike(
    student_logits: Float[Tensor, "*tokens vocab_local"],
    teacher_logits: Float[Tensor, "*teacher_tokens vocab_local"],
    teacher_rows: Int[Tensor, "*tokens"] | None,
) -> None:
    num_local = student_logits.shape[-1]
    if teacher_logits.shape[-1] != num_local:
        raise ValueError(
            f"teacher_logits {tuple(teacher_logits.shape)} must shard the vocabulary like student_logits "
            f"{tuple(student_logits.shape)}: {num_local} columns on this rank"
        )
    if (teacher_logits.shape[:-1] if teacher_rows is None else teacher_rows.shape) != student_logits.shape[:-1]:
        name, given = ("teacher_logits", teacher_logits) if teacher_rows is None else ("teacher_rows", teacher_rows)
        raise ValueError(
            f"{name} {tuple(given.shape)} must have student_logits' leading shape, {tuple(student_logits.shape)}"
        )


class _Divergence(torch.autograd.Function):
    """[N] from student [N, V_local] and teacher [M, V_local] logits and the teacher's row for each of the student's."""

    @staticmethod
    def forward(ctx, student, teacher, rows, temperature, shard, of, overwrite):
        active = rows >= 0
        pairs = Pairs(student, teacher, rows.clamp(min=0), temperature, shard.num_columns)
        parts = _all_shards(pair_stats(pairs, of, active), shard)
        row_max, sums, teacher_max, teacher_sums, products = merge_pairs(parts, of)

        empty, teacher_empty = sums == 0, teacher_sums == 0  # every logit of the row is −inf
        sums, teacher_sums = sums.masked_fill(empty, 1.0), teacher_sums.masked_fill(teacher_empty, 1.0)
        log_sum, teacher_log_sum = sums.log(), teacher_sums.log()
        result = products / (sums if of == "reverse" else teacher_sums)
        if of == "cross_entropy":
            result = result + log_sum
        else:
            result = result + (log_sum - teacher_log_sum if of == "forward" else teacher_log_sum - log_sum)
        result = result.masked_fill(empty, torch.inf).masked_fill(teacher_empty | ~active, 0.0)
        active = active & ~empty & ~teacher_empty

        kl = None
        if of == "reverse":
            active, kl = active & (result != torch.inf), result.clone()
        ctx.save_for_backward(
            student, teacher, pairs.rows, temperature, row_max, log_sum, teacher_max, teacher_log_sum, kl, active
        )
        ctx.num_columns, ctx.of, ctx.overwrite, ctx.consumed = shard.num_columns, of, overwrite, False
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        operator = "vocab_parallel_soft_cross_entropy" if ctx.of == "cross_entropy" else "vocab_parallel_kl"
        student, teacher, rows, temperature, *normalisers, kl, active = saved(ctx, operator)
        out = student.detach() if ctx.overwrite else torch.empty_like(student)
        pairs = Pairs(student.detach(), teacher, rows, temperature, ctx.num_columns)
        write_pair_gradients(out, pairs, Normalisers(*normalisers), kl, grad, active & (grad != 0))
        ctx.consumed = ctx.overwrite
        return out, *(None,) * 6


def _all_shards(stats: Float[Tensor, "rows 5"], shard: VocabShard) -> Float[Tensor, "tp rows 5"]:
    """Return every rank's statistics, in rank order."""
    if not shard.is_parallel:
        return stats[None]
    parts = stats.new_empty(dist.get_world_size(shard.group), *stats.shape)
    dist.all_gather(list(parts.unbind(0)), stats, group=shard.group)
    return parts

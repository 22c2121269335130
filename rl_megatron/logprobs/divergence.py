"""Divergences between two models' distributions, from sharded logits: the cross-entropy and both KLs."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rl_megatron.logprobs.api import flatten_temperature, vocab_shard
from rl_megatron.logprobs.divergence_rows import (
    Divergence,
    Normalisers,
    Pairs,
    merge_pairs,
    pair_stats,
    write_pair_gradients,
)
from rl_megatron.logprobs.flatten import from_rows, may_be_overwritten, memory_order, to_rows
from rl_megatron.logprobs.vocab_parallel import check, differentiate_once, load_saved
from rl_megatron.topology.collectives import gather_from_ranks


def vocab_parallel_soft_cross_entropy(
    student_logits: Float[Tensor, "*tokens vocab_local"],
    teacher_logits: Float[Tensor, "*teacher_tokens vocab_local"],
    tp_group: dist.ProcessGroup | None = None,
    *,
    teacher_rows: Int[Tensor, "*tokens"] | None = None,
    valid_vocab_size: int | None = None,
) -> Float[Tensor, "*tokens"]:
    """Return −Σ_v p(v)·log q(v) of each row, for a student q = softmax(x) and a constant teacher p = softmax(y).

        M = max_v x_v,  s = Σ_v e^{x_v−M},  M' = max_v y_v,  s' = Σ_v e^{y_v−M'},  u = −Σ_v e^{y_v−M'}·(x_v−M)
        CE = log s + u/s'        ∂CE/∂x = q − p

    Sums are over the whole vocabulary. Both models shard its columns over `tp_group` equally and in rank order. The
    result is in nats.

    Cost: forward reads both logits once and makes one all-gather of 20 bytes per row and rank. Backward reads both once
    and writes once, without a collective. No buffer of the logits' size is allocated: rows are processed in blocks, in
    fp32, and the gradient is rounded once, to the student's dtype. Backward overwrites the student's logits with their
    gradient, with the checks and exceptions of `vocab_parallel_logprobs`.

    Special values: rows whose teacher row is −1 have CE 0 and gradient exactly 0, whatever their logits are, including
    NaN. If the student has −inf at an id with p > 0, CE is ∞, but the gradient q − p is finite. If
    the student's or the teacher's row has only −inf, the gradient is 0. If the teacher's row has only −inf, CE is 0.

    Shapes: student_logits [..., V_local]; teacher_logits [*, V_local]; teacher_rows [...]. Returns [...].

    Args:
        student_logits: This rank's columns of the student's logits.
        teacher_logits: This rank's columns of the teacher's logits. It has no gradient.
        tp_group: The group over which the vocabulary is sharded; None: it is not sharded.
        teacher_rows: For each student row, the index of its teacher row in the flattened leading dimensions of
            teacher_logits; −1: it has no teacher row. None: both logits have the same leading shape, and rows at the
            same position are compared.
        valid_vocab_size: Ids from this one on are padding. They are in no softmax and no gradient.

    Raises:
        ValueError: Shapes do not fit, or teacher_rows is out of range.

    Source: Hinton, Vinyals & Dean 2015, "Distilling the Knowledge in a Neural Network" (arXiv:1503.02531), eq. 2 at
    temperature 1. Statistics are merged across shards as in `vocab_parallel_logprobs`.
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
    """Return the KL divergence of each row, for a student q = softmax(x/T) and a constant teacher p = softmax(y/T).

        forward:  KL(p‖q) = Σ_v p·(log p − log q)        ∂/∂x = (1/T)·(q − p)
        reverse:  KL(q‖p) = Σ_v q·(log q − log p)        ∂/∂x = (1/T)·q·((log q − log p) − KL)

    Sums are over the whole vocabulary. Layout, cost, memory, checks and the treatment of rows without a teacher row are
    as in `vocab_parallel_soft_cross_entropy`. The result is in nats. The differences log p − log q are summed, so the
    KL of equal logits is exactly 0. Rounding can make the KL of similar logits slightly negative.

    Special values of KL(a‖b), with (a, b) = (p, q) or (q, p):

    - Ids whose logit is −inf in a add 0.
    - Ids whose logit is −inf only in b make the KL ∞. The gradient of the forward KL, q − p, is finite. That of the
      reverse KL would be infinite, and is set to 0.
    - A teacher row with only −inf gives KL 0 and gradient 0. A student row with only −inf gives KL ∞ and gradient 0.

    Shapes: as in `vocab_parallel_soft_cross_entropy`; temperature a number or a tensor that broadcasts to [...].

    Args:
        student_logits: This rank's columns of the student's logits.
        teacher_logits: This rank's columns of the teacher's logits. It has no gradient.
        tp_group: The group over which the vocabulary is sharded; None: it is not sharded.
        direction: "forward" for KL(p‖q) or "reverse" for KL(q‖p).
        temperature: T, a positive number per student row. It has no gradient.
        teacher_rows: See `vocab_parallel_soft_cross_entropy`.
        valid_vocab_size: Ids from this one on are padding. They are in no softmax and no gradient.

    Raises:
        ValueError: Shapes do not fit, teacher_rows is out of range, or the direction is unknown.

    Source: forward, Hinton et al. 2015 (arXiv:1503.02531), without that paper's factor T²; reverse, Gu et al. 2024,
    "MiniLLM" (arXiv:2306.08543).
    """
    if direction not in ("forward", "reverse"):
        raise ValueError(
            f"direction={direction!r} must be 'forward', KL(teacher‖student), or 'reverse', KL(student‖teacher)"
        )
    return _compare(direction, student_logits, teacher_logits, tp_group, temperature, teacher_rows, valid_vocab_size)


def _compare(
    divergence: Divergence,
    student_logits: Float[Tensor, "*tokens vocab_local"],
    teacher_logits: Float[Tensor, "*teacher_tokens vocab_local"],
    tp_group: dist.ProcessGroup | None,
    temperature: float | Float[Tensor, "*#tokens"],
    teacher_rows: Int[Tensor, "*tokens"] | None,
    valid_vocab_size: int | None,
) -> Float[Tensor, "*tokens"]:
    """Return the chosen divergence of each student row from its teacher row."""
    leading, num_local = student_logits.shape[:-1], student_logits.shape[-1]
    _check_alike(student_logits, teacher_logits, teacher_rows)
    order, teacher_order = memory_order(student_logits), memory_order(teacher_logits)
    student, teacher = to_rows(student_logits, order), to_rows(teacher_logits.detach(), teacher_order)
    # The position in memory of each teacher row.
    in_memory = torch.arange(teacher.shape[0], device=teacher.device)
    rows = from_rows(in_memory, teacher_logits.shape[:-1], teacher_order)
    if teacher_rows is not None:
        check(
            ((teacher_rows >= -1) & (teacher_rows < teacher.shape[0])).all(),
            lambda: (
                f"teacher_rows {teacher_rows.min()} … {teacher_rows.max()} must be in [-1, {len(teacher)}): a row of "
                "the teacher, or -1 for none"
            ),
        )
        chosen_rows = rows.flatten().index_select(0, teacher_rows.clamp(min=0).flatten())
        rows = chosen_rows.view_as(teacher_rows).masked_fill(teacher_rows < 0, -1)
    dtype = torch.promote_types(torch.promote_types(student.dtype, teacher.dtype), torch.float32)
    result = _Divergence.apply(
        student,
        teacher,
        to_rows(rows[..., None], order)[:, 0],
        flatten_temperature(temperature, rows, order, dtype),
        vocab_shard(num_local, tp_group, None, valid_vocab_size),
        divergence,
        may_be_overwritten(student),
    )
    return from_rows(result, leading, order)


def _check_alike(
    student_logits: Float[Tensor, "*tokens vocab_local"],
    teacher_logits: Float[Tensor, "*teacher_tokens vocab_local"],
    teacher_rows: Int[Tensor, "*tokens"] | None,
) -> None:
    """Raise ValueError, naming the shapes, unless both models' logits and teacher_rows fit together."""
    num_local = student_logits.shape[-1]
    if teacher_logits.shape[-1] != num_local:
        raise ValueError(
            f"teacher_logits {tuple(teacher_logits.shape)} must shard the vocabulary like student_logits "
            f"{tuple(student_logits.shape)}: {num_local} columns on this rank"
        )
    if (teacher_logits.shape[:-1] if teacher_rows is None else teacher_rows.shape) != student_logits.shape[:-1]:
        name, other = ("teacher_logits", teacher_logits) if teacher_rows is None else ("teacher_rows", teacher_rows)
        raise ValueError(
            f"{name} {tuple(other.shape)} must have the leading shape of student_logits {tuple(student_logits.shape)}"
        )


class _Divergence(torch.autograd.Function):
    """The divergence [N] of each row of student logits [N, V_local] from its row of teacher logits [M, V_local]."""

    @staticmethod
    def forward(ctx, student, teacher, rows, temperature, shard, divergence, overwrite):
        active = rows >= 0
        pairs = Pairs(student, teacher, rows.clamp(min=0), temperature, shard.num_columns)
        parts = gather_from_ranks(pair_stats(pairs, (divergence,), active), shard.group)
        row_max, sums, teacher_max, teacher_sums, products = merge_pairs(parts, (divergence,))

        empty, teacher_empty = sums == 0, teacher_sums == 0  # every logit of the row is −inf
        sums, teacher_sums = sums.masked_fill(empty, 1.0), teacher_sums.masked_fill(teacher_empty, 1.0)
        log_sum, teacher_log_sum = sums.log(), teacher_sums.log()
        result = products / (sums if divergence == "reverse" else teacher_sums)
        if divergence == "cross_entropy":
            result = result + log_sum
        else:
            result = result + (log_sum - teacher_log_sum if divergence == "forward" else teacher_log_sum - log_sum)
        result = result.masked_fill(empty, torch.inf).masked_fill(teacher_empty | ~active, 0.0)
        active = active & ~empty & ~teacher_empty

        kl = None
        if divergence == "reverse":
            active, kl = active & (result != torch.inf), result.clone()
        ctx.save_for_backward(
            student, teacher, pairs.rows, temperature, row_max, log_sum, teacher_max, teacher_log_sum, kl, active
        )
        ctx.num_columns, ctx.divergence = shard.num_columns, divergence
        ctx.overwrite, ctx.consumed = overwrite, False
        return result

    @staticmethod
    @differentiate_once
    def backward(ctx, grad):
        operator = "vocab_parallel_soft_cross_entropy" if ctx.divergence == "cross_entropy" else "vocab_parallel_kl"
        student, teacher, rows, temperature, *normalisers, kl, active = load_saved(ctx, operator)
        out = student.detach() if ctx.overwrite else torch.empty_like(student)
        pairs = Pairs(student.detach(), teacher, rows, temperature, ctx.num_columns)
        write_pair_gradients(out, pairs, Normalisers(*normalisers), kl, grad, active & (grad != 0))
        ctx.consumed = ctx.overwrite
        return out, *(None,) * 6

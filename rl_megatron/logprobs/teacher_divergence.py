"""`teacher_divergences`: compare a student's sharded logits with a teacher's, which may be computed block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.logprobs.api import IGNORE_INDEX, flatten_temperature, vocab_shard
from rl_megatron.logprobs.divergence_rows import Divergence, Normalisers, Pairs, merge_pairs, pair_stats
from rl_megatron.logprobs.flatten import from_rows, may_be_overwritten, memory_order, to_rows
from rl_megatron.logprobs.kernels.tiles import exponentials, row_blocks, row_sums, scratch_tiles
from rl_megatron.logprobs.linear import BLOCK_ELEMENTS_CPU, BLOCK_ELEMENTS_CUDA, DeferredLogits
from rl_megatron.logprobs.vocab_parallel import VocabShard, check, differentiate_once, load_saved
from rl_megatron.topology.collectives import gather_from_ranks

TeacherDivergence = Literal["forward", "reverse", "jensen_shannon"]


class TeacherDivergences(NamedTuple):
    """Per-token results in fp32 (fp64 for fp64 logits). They are differentiable, and the same on every tp rank.

    Attributes:
        divergences: One column for each requested divergence, [..., D].
        logprobs: The student's log q(target), [...].
    """

    divergences: Float[Tensor, "*tokens divergences"]
    logprobs: Float[Tensor, "*tokens"]


def teacher_divergences(
    student_logits: Float[Tensor, "*tokens vocab_local"],
    teacher: Float[Tensor, "*tokens vocab_local"] | DeferredLogits,
    targets: Int[Tensor, "*tokens"],
    tp_group: dist.ProcessGroup | None = None,
    *,
    divergences: Sequence[TeacherDivergence] = ("forward",),
    beta: float = 0.5,
    temperature: float | Float[Tensor, "*#tokens"] = 1.0,
    ignore_index: int = IGNORE_INDEX,
    valid_vocab_size: int | None = None,
) -> TeacherDivergences:
    """Return divergences of each row between a student q = softmax(x/T) and a constant teacher p = softmax(y/T).

        forward:         KL(p‖q) = Σ_v p·(log p − log q)             ∂/∂x = (1/T)·(q − p)
        reverse:         KL(q‖p) = Σ_v q·(log q − log p)             ∂/∂x = (1/T)·q·((log q − log p) − KL(q‖p))
        jensen_shannon:  β·KL(p‖m) + (1−β)·KL(q‖m), m = β·p + (1−β)·q
                                                                     ∂/∂x = ((1−β)/T)·q·((log q − log m) − KL(q‖m))

    Sums are over the whole vocabulary, whose columns both models shard over `tp_group` equally and in rank order. The
    student's log q(target) is returned too, so that one operator serves a loss that also has a cross-entropy.

    Cost: forward reads both logits once, and makes one all-gather of up to 32 bytes per row and rank. The
    Jensen-Shannon divergence needs the normalisers of both models first, so forward reads both logits twice and makes a
    second all-gather, of 8 bytes. Backward reads both once and writes once, without a collective. No buffer of the
    logits' size is allocated. Backward overwrites the student's logits with their gradient, with the checks and
    exceptions of `vocab_parallel_logprobs`.

    Teacher: the logits of `DeferredLogits` are computed from hidden states one token block at a time, and again
    whenever they are read, so that they are never in memory as a whole.

    Special values: rows whose target is `ignore_index` have divergences and logprob 0 and gradient exactly 0, whatever
    their logits are, including NaN. If single logits are −inf, the KL divergences are as in `vocab_parallel_kl`, and
    the Jensen-Shannon divergence is finite. All divergences are 0 if the teacher's row has only −inf, and otherwise ∞
    if the student's row does. In both cases they have gradient 0.

    Shapes: student_logits [..., V_local]; a teacher of the same shape; targets [...]; temperature a number or a tensor
    that broadcasts to [...]. Returns [..., D] and [...].

    Args:
        student_logits: This rank's columns of the student's logits.
        teacher: This rank's columns of the teacher's logits. It has no gradient.
        targets: Global ids, or `ignore_index`.
        tp_group: The group over which the vocabulary is sharded; None: it is not sharded.
        divergences: The divergences to return.
        beta: The teacher's weight β in m, in (0, 1), for jensen_shannon. The divergence approaches β·forward for β → 0,
            and (1−β)·reverse for β → 1.
        temperature: T, a positive number per row. It has no gradient.
        ignore_index: The target of rows to leave out.
        valid_vocab_size: Ids from this one on are padding. They are in no softmax and no gradient.

    Raises:
        ValueError: Shapes do not fit.

    Source: Agarwal et al. 2023, "On-Policy Distillation of Language Models" (arXiv:2306.13649), eq. 1 and 2.
    """
    if tuple(teacher.shape) != tuple(student_logits.shape) or targets.shape != student_logits.shape[:-1]:
        raise ValueError(
            f"the teacher's logits {tuple(teacher.shape)} must be laid out like the student's "
            f"{tuple(student_logits.shape)}, and targets {tuple(targets.shape)} must have their leading shape"
        )
    order = memory_order(student_logits)
    student, row_targets = to_rows(student_logits, order), to_rows(targets[..., None], order)[:, 0]
    shard = vocab_shard(student_logits.shape[-1], tp_group, None, valid_vocab_size)
    results = _TeacherDivergences.apply(
        student,
        _read_teacher(teacher, order, tp_group),
        row_targets,
        flatten_temperature(temperature, targets, order, torch.promote_types(student.dtype, torch.float32)),
        shard,
        tuple(divergences),
        beta,
        row_targets != ignore_index,
        may_be_overwritten(student),
    )
    return TeacherDivergences(*(from_rows(rows, targets.shape, order) for rows in results))


@dataclass(frozen=True)
class _TeacherRows:
    """The teacher's logits for every student row, in the order of the student's rows.

    Attributes:
        logits: The logits [N, V_local], or None if they are computed from hidden states.
        hidden: The hidden states [N, H], or None.
        weight: The head's weight [V_local, H], or None.
        block_rows: The number of rows in a block.
    """

    logits: Tensor | None
    hidden: Tensor | None
    weight: Tensor | None
    block_rows: int

    def blocks(self, active: Bool[Tensor, " rows"]) -> Iterator[tuple[slice, Float[Tensor, "block vocab_local"]]]:
        """Yield blocks of rows with their logits. On a CPU, blocks without an active row are left out."""
        on_cpu = active.device.type == "cpu"
        for start in range(0, len(active), self.block_rows):
            block = slice(start, min(start + self.block_rows, len(active)))
            if not on_cpu or active[block].any():
                yield block, self._read(block)

    def _read(self, block: slice) -> Tensor:
        if self.logits is not None:
            return self.logits[block]
        assert self.hidden is not None and self.weight is not None
        return self.hidden[block] @ self.weight.T


def _read_teacher(
    teacher: Tensor | DeferredLogits, order: list[int], tp_group: dist.ProcessGroup | None
) -> _TeacherRows:
    """Return the teacher's logits as rows in the memory order of the student's."""
    if isinstance(teacher, Tensor):
        return _TeacherRows(to_rows(teacher.detach(), order), None, None, max(1, teacher[..., 0].numel()))
    hidden, weight = teacher.hidden.detach(), teacher.weight.detach()
    if teacher.sequence_shards > 1:
        hidden = gather_from_ranks(hidden, tp_group).flatten(0, 1)
    elements = BLOCK_ELEMENTS_CPU if hidden.device.type == "cpu" else BLOCK_ELEMENTS_CUDA
    block_rows = teacher.block_tokens or max(1, elements // max(1, len(weight)))
    return _TeacherRows(None, to_rows(hidden.transpose(0, 1), order), weight, block_rows)


class _TeacherDivergences(torch.autograd.Function):
    """The divergences [N, D] of rows of student [N, V_local] and teacher logits, and the student's logprobs [N]."""

    @staticmethod
    def forward(ctx, student, teacher, targets, temperature, shard, divergences, beta, counted, overwrite):
        one_pass: tuple[Divergence, ...] = tuple(d for d in divergences if d != "jensen_shannon")
        columns = (targets - shard.start).clamp(0, max(0, shard.num_columns - 1))
        owned = counted & (targets >= shard.start) & (targets < shard.start + shard.num_columns)
        rows = _Rows(student, teacher, temperature, shard, counted)
        dtype = torch.promote_types(student.dtype, torch.float32)
        target_x = torch.where(owned, student.gather(1, columns[:, None])[:, 0].to(dtype), 0.0)
        target_x = target_x if temperature is None else target_x / temperature
        # The sum of `owned` over ranks shows whether some rank owns each target.
        stats = torch.cat([rows.stats(one_pass), target_x[:, None], owned[:, None].to(dtype)], dim=1)
        parts = gather_from_ranks(stats, shard.group)
        check(
            (parts[..., -1].sum(dim=0) == counted).all(),
            lambda: f"targets {targets.min()} … {targets.max()} must be in the vocabulary, or ignored",
        )
        row_max, sums, teacher_max, teacher_sums, *products = merge_pairs(parts[..., :-2], one_pass)
        empty, teacher_empty = sums == 0, teacher_sums == 0  # every logit of the row is −inf
        sums, teacher_sums = sums.masked_fill(empty, 1.0), teacher_sums.masked_fill(teacher_empty, 1.0)
        normalisers = Normalisers(row_max, sums.log(), teacher_max, teacher_sums.log())
        results: dict[str, Tensor] = {}
        for divergence, product in zip(one_pass, products, strict=True):
            difference = normalisers.log_sum - normalisers.teacher_log_sum
            forward = divergence == "forward"
            results[divergence] = product / (teacher_sums if forward else sums) + (
                difference if forward else -difference
            )
        student_kl = None
        if "jensen_shannon" in divergences:
            teacher_kl, student_kl = (
                gather_from_ranks(rows.kls_to_mixture(normalisers, beta), shard.group).sum(0).unbind(-1)
            )
            results["jensen_shannon"] = beta * teacher_kl + (1 - beta) * student_kl
        for name, result in results.items():
            results[name] = result.masked_fill(empty, torch.inf).masked_fill(teacher_empty | ~counted, 0.0)
        logprobs = (parts[..., -2].sum(dim=0) - row_max - normalisers.log_sum).masked_fill(empty, -torch.inf)

        reverse = results.get("reverse")
        result = torch.stack([results[name] for name in divergences], dim=1)
        ctx.save_for_backward(
            student, temperature, *normalisers, None if reverse is None else reverse.clone(), student_kl, columns,
            owned, counted & ~empty & ~teacher_empty, counted & ~empty,
        )  # fmt: skip
        ctx.teacher, ctx.shard, ctx.divergences, ctx.beta = teacher, shard, divergences, beta
        ctx.overwrite, ctx.consumed = overwrite, False
        return result, logprobs.masked_fill(~counted, 0.0)

    @staticmethod
    @differentiate_once
    def backward(ctx, grads, logprob_grad):
        student, temperature, *saved_rows = load_saved(ctx, "teacher_divergences")
        normalisers, (reverse, student_kl, columns, owned, comparable, counted) = (
            Normalisers(*saved_rows[:4]), saved_rows[4:],
        )  # fmt: skip
        out = student.detach() if ctx.overwrite else torch.empty_like(student)
        scale = 1.0 if temperature is None else 1.0 / temperature
        by_name = {
            name: torch.where(comparable, grad, 0.0) * scale
            for name, grad in zip(ctx.divergences, grads.unbind(1), strict=True)
        }
        if reverse is not None:
            by_name["reverse"] = by_name["reverse"].masked_fill(reverse == torch.inf, 0.0)
        logprob_grad = torch.where(counted, logprob_grad, 0.0) * scale
        active = torch.stack([logprob_grad, *by_name.values()]).ne(0).any(dim=0)
        rows = _Rows(student.detach(), ctx.teacher, temperature, ctx.shard, active)
        at_target = columns, torch.where(owned, logprob_grad, 0.0)
        rows.write_gradients(out, normalisers, by_name, logprob_grad, at_target, reverse, student_kl, ctx.beta)
        ctx.consumed = ctx.overwrite
        return out, *(None,) * 8


@dataclass(frozen=True)
class _Rows:
    """The rows of both models on this rank, read block by block.

    Attributes:
        student: The student's logits, [N, V_local].
        teacher: The teacher's logits.
        temperature: T of each row, or None for 1.
        shard: This rank's shard of the vocabulary.
        active: The rows to read, [N].
    """

    student: Tensor
    teacher: _TeacherRows
    temperature: Tensor | None
    shard: VocabShard
    active: Tensor

    def stats(self, divergences: Sequence[Divergence]) -> Float[Tensor, "rows statistics"]:
        """Return the `pair_stats` of each row. Those of inactive rows are undefined."""
        dtype = torch.promote_types(self.student.dtype, torch.float32)
        stats = self.student.new_zeros(len(self.student), 4 + len(divergences), dtype=dtype)
        for block, pairs in self._pairs():
            stats[block] = pair_stats(pairs, divergences, self.active[block]).to(dtype)
        return stats

    def kls_to_mixture(self, normalisers: Normalisers, beta: float) -> Float[Tensor, "rows 2"]:
        """Return this shard's parts of KL(p‖m) and KL(q‖m) of each row, with m = β·p + (1−β)·q."""
        kls = normalisers.log_sum.new_zeros(len(self.student), 2)
        for rows, tiles in self._tiles(normalisers, count=5):
            log_q, log_p, q, p, log_m = tiles[:, : rows.stop - rows.start]
            _log_mixture(q, p, beta, out=log_m)
            for column, (weights, log_weights) in enumerate(((p, log_p), (q, log_q))):
                log_weights.sub_(log_m).mul_(weights).masked_fill_(weights == 0, 0.0)
                kls[rows, column] = row_sums(tiles[1 - column], rows.stop - rows.start).to(kls.dtype)
        return kls

    def write_gradients(
        self, out: Tensor, normalisers: Normalisers, grads: dict[str, Tensor], logprob_grad: Tensor,
        at_target: tuple[Tensor, Tensor], reverse: Tensor | None, student_kl: Tensor | None, beta: float,
    ) -> None:  # fmt: skip
        """Write the gradient of all results into `out`.

        Args:
            out: The gradient, [N, V_local], which may be the student itself.
            normalisers: M, log s, M' and log s'.
            grads: The upstream gradient of each divergence, divided by the temperature.
            logprob_grad: The upstream gradient of the logprobs, divided by the temperature.
            at_target: The targets' local columns, and logprob_grad for targets that this rank owns, 0 for others.
            reverse: KL(q‖p), or None.
            student_kl: KL(q‖m), or None.
            beta: β of the Jensen-Shannon divergence.
        """
        done, (columns, target_grads) = torch.zeros(len(out), dtype=torch.bool), at_target  # `done` is on the host
        for rows, tiles in self._tiles(normalisers, count=6):
            log_q, log_p, q, p, scratch, total = tiles[:, : rows.stop - rows.start]
            total.copy_(q).mul_(-logprob_grad[rows, None])
            if "forward" in grads:
                total.add_(torch.sub(q, p, out=scratch).mul_(grads["forward"][rows, None]))
            if "reverse" in grads:
                assert reverse is not None
                torch.sub(log_q, log_p, out=scratch).sub_(reverse[rows, None])
                grad = grads["reverse"][rows, None]
                scratch.mul_(q).masked_fill_((q == 0) | (grad == 0), 0.0)  # an infinite KL has no gradient
                total.add_(scratch.mul_(grad))
            if "jensen_shannon" in grads:
                assert student_kl is not None
                _log_mixture(q, p, beta, out=scratch)
                torch.sub(log_q, scratch, out=scratch).sub_(student_kl[rows, None])
                scratch.mul_(q).masked_fill_(q == 0, 0.0)
                total.add_(scratch.mul_((1 - beta) * grads["jensen_shannon"][rows, None]))
            total.scatter_add_(1, columns[rows, None], target_grads[rows, None].to(total.dtype))
            total.masked_fill_(~self.active[rows, None], 0.0)
            out[rows, : self.shard.num_columns].copy_(total)  # the only rounding to the student's dtype
            done[rows] = True
        out[:, self.shard.num_columns :].zero_()
        if not done.all():
            out[~done.to(out.device)] = 0.0

    def _pairs(self) -> Iterator[tuple[slice, Pairs]]:
        """Yield blocks of rows with the logits of both models."""
        for block, logits in self.teacher.blocks(self.active):
            temperature = None if self.temperature is None else self.temperature[block]
            rows = torch.arange(len(logits), device=logits.device)
            yield block, Pairs(self.student[block], logits, rows, temperature, self.shard.num_columns)

    def _tiles(self, normalisers: Normalisers, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and `count` scratch tiles. The first four hold log q, log p, q and p of these rows."""
        if self.shard.num_columns == 0:
            return
        for outer, pairs in self._pairs():
            blocks = row_blocks(self.active[outer], pairs.num_columns)
            tiles = scratch_tiles(count, blocks, pairs.num_columns, pairs.dtype, self.student.device)
            for block, skip in blocks:
                if skip:
                    continue
                rows = slice(outer.start + block.start, outer.start + block.stop)
                log_q, log_p, q, p, *_ = tiles[:, : block.stop - block.start]
                pairs.load(block, log_q, log_p)
                row_max, log_sum, teacher_max, teacher_log_sum = (values[rows, None] for values in normalisers)
                exponentials(log_q.sub_(row_max).sub_(log_sum), out=q)
                exponentials(log_p.sub_(teacher_max).sub_(teacher_log_sum), out=p)
                yield rows, tiles


def _log_mixture(q: Tensor, p: Tensor, beta: float, out: Tensor) -> None:
    """Write log m into a tile, with m = β·p + (1−β)·q. It is −inf at ids with p = q = 0."""
    torch.mul(p, beta, out=out).add_(q, alpha=1 - beta).log_()

"""The kernels in Triton: one program per row, one read of the logits forward, one read and one write backward.

Three further kernels do the remaining work per row. torch would launch dozens of kernels for it, which would take
longer than reading the logits of a few thousand rows.

`kernels/torch.py` documents the contract of the functions, which both modules share. x is z · (1/T) for a logit z. All
x of a row have the same rounded 1/T, which acts like a slightly different T. Nothing is tuned at run time and there are
no atomics, so the bits of a row's result depend only on its own data and the number of columns. A product and a sum are
fused only in explicit `fma` calls. A fused product is not rounded, so that x − M would not be exactly 0 for the
likeliest column.

Import this module only if triton is needed. On a CPU it runs in Triton's interpreter if TRITON_INTERPRET=1 was set
before the first import of triton.
"""

# Triton's type hints describe a kernel launch as a plain call, without launch keywords such as num_warps. Kernels also
# assign some variables only under constexpr conditions. Type checkers understand neither, so these rules are off.
# pyright: reportCallIssue=false, reportUnboundVariable=false

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.logprobs.kernels import torch as torch_kernels

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# e and 2 to this power are exactly 0 in fp32. Exponents that are also factors are clamped to it from below: 0 · (−inf)
# is NaN.
LOWEST_EXPONENT = tl.constexpr(-1000.0)

ROWS = 256  # rows per program, in kernels that read no logits
LANE = tl.constexpr(8)  # neighbouring columns that one thread reads at a time: 128 bits of bf16


def row_stats(
    logits: Float[Tensor, "rows vocab_local"],
    columns: Int[Tensor, " rows"],
    num_columns: int,
    temperature: Float[Tensor, " rows"] | None,
    entropy: bool,
    active: Bool[Tensor, " rows"],
    threshold: Float[Tensor, " rows"] | None = None,
) -> Float[Tensor, "rows 4"]:
    """Return (m, s, t, x_y) of each row. For formulas, shapes and units, see `torch_kernels.row_stats`.

    The kernel is online over blocks of columns. Each lane of 8 columns keeps its own (m, s, t), so no thread waits for
    another before the row's end. If a lane's maximum rises from m to m', δ is m − m', t ← e^δ·(t + δ·s) and s ← e^δ·s.
    """
    if _needs_torch(logits):
        return torch_kernels.row_stats(logits, columns, num_columns, temperature, entropy, active, threshold)
    num_rows = logits.shape[0]
    if num_columns == 0 or num_rows == 0:
        return logits.new_tensor([-torch.inf, 0, 0, 0], dtype=torch.float32).repeat(num_rows, 1)
    stats = logits.new_empty(num_rows, 4, dtype=torch.float32)
    block, num_warps = choose_block(num_columns)
    with _use_device(logits):
        row_stats_kernel[(num_rows,)](
            stats, logits, *_pack(columns, active, temperature, threshold), _row_stride(logits), num_columns,
            ENTROPY=entropy, BLOCK=block, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip
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
    """Write dL/dlogits into `out`, which may be `logits`. See `torch_kernels.write_row_gradients` for the formula.

    A single target column is handled in the pass over the columns. The gradients at several target columns are computed
    before the first write and stored after the last one. A column may then be given several times; its gradients are
    summed in the order given.
    """
    if _needs_torch(logits):
        torch_kernels.write_row_gradients(
            out, logits, num_columns, temperature, row_max, log_sum, base, entropy_grad, columns, column_grads, active,
            threshold,
        )  # fmt: skip
        return
    out[:, num_columns:].zero_()
    num_rows, num_targets = columns.shape
    if num_columns == 0 or num_rows == 0:
        return
    block, num_warps = choose_block(num_columns)
    with _use_device(logits):
        row_gradients_kernel[(num_rows,)](
            out, logits,
            *_pack(temperature, row_max, log_sum, base, entropy_grad, columns, column_grads, active, threshold),
            _row_stride(out), _row_stride(logits), num_columns, num_targets,
            TARGETS=triton.next_power_of_2(num_targets) if num_targets else 0, BLOCK=block, num_warps=num_warps,
            enable_fp_fusion=False,
        )  # fmt: skip


def gather_columns(
    logits: Float[Tensor, "rows vocab_local"],
    columns: Int[Tensor, "rows ids"],
    temperature: Float[Tensor, " rows"] | None,
) -> Float[Tensor, "rows ids"]:
    """Return `torch_kernels.gather_columns`, with x rounded as in these kernels."""
    if _needs_torch(logits):
        return torch_kernels.gather_columns(logits, columns, temperature)
    x = torch_kernels.gather_columns(logits, columns, None)
    return x if temperature is None else x * temperature.reciprocal()[:, None]


def local_columns(ids: Int[Tensor, "*tokens"], start: int, num_columns: int) -> Int[Tensor, "*tokens"]:
    """Return `torch_kernels.local_columns`."""
    ids = ids.contiguous()
    columns = torch.empty_like(ids)
    with _use_device(ids):
        local_columns_kernel[_choose_grid(ids.numel())](columns, ids, start, num_columns, ids.numel(), BLOCK=ROWS)
    return columns


def merge_rows(
    parts: Float[Tensor, "tp rows 4"], ignored: Bool[Tensor, " rows"], entropy: bool
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"] | None, Tensor, Tensor, Bool[Tensor, " rows"]]:
    """Return `torch_kernels.merge_rows`."""
    if parts.dtype != torch.float32:
        return torch_kernels.merge_rows(parts, ignored, entropy)
    num_parts, num_rows, _ = parts.shape
    logprobs, row_max, log_sum = parts.new_empty(3, num_rows).unbind(0)
    row_entropy = parts.new_empty(num_rows) if entropy else None
    active = torch.empty_like(ignored)
    with _use_device(parts):
        merge_rows_kernel[_choose_grid(num_rows)](
            logprobs, row_entropy, row_max, log_sum, active, parts, ignored, parts.stride(0), num_parts, num_rows,
            BLOCK=ROWS, enable_fp_fusion=False,
        )  # fmt: skip
    return logprobs, row_entropy, row_max, log_sum, active


def target_slopes(
    target_grad: Float[Tensor, " rows"],
    entropy_grad: Float[Tensor, " rows"] | None,
    entropy: Float[Tensor, " rows"] | None,
    active: Bool[Tensor, " rows"],
) -> tuple[Float[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """Return `torch_kernels.target_slopes`."""
    if target_grad.dtype != torch.float32:
        return torch_kernels.target_slopes(target_grad, entropy_grad, entropy, active)
    num_rows = len(target_grad)
    base, touched = target_grad.new_empty(num_rows), torch.empty_like(active)
    if entropy_grad is None:
        entropy = None
    with _use_device(target_grad):
        target_slopes_kernel[_choose_grid(num_rows)](
            base, touched, *_pack(target_grad, entropy_grad, entropy, active), num_rows, BLOCK=ROWS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return base, touched


def choose_block(num_columns: int) -> tuple[int, int]:
    """Return (columns per step, warps) of a program.

    A thread processes 16 columns per step: two 128-bit loads of bf16 in flight. Rows of 65536 columns or more, of which
    there are few, use eight warps. On an H200, more loads per thread or prefetched blocks were no faster.
    """
    block = min(max(LANE.value, 1 << (num_columns - 1).bit_length()), 4096 if num_columns >= 1 << 16 else 2048)
    return block, max(1, block // 512)


def _needs_torch(logits: Tensor) -> bool:
    """Return whether the torch kernels must be used: for fp64 logits, or if columns are not contiguous in memory."""
    return logits.dtype == torch.float64 or (logits.shape[1] > 1 and logits.stride(1) != 1)


def _use_device(tensor: Tensor) -> AbstractContextManager:
    """Return a context in which the tensor's GPU is the current one, because Triton launches on the current GPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _pack(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return per-row arguments as contiguous tensors. A broadcast temperature, for example, has stride 0."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _choose_grid(num_rows: int) -> tuple[int]:
    """Return the grid of a kernel whose programs process `ROWS` rows each. An empty grid could not be launched."""
    return (max(1, -(-num_rows // ROWS)),)


def _row_stride(rows: Tensor) -> int:
    """Return the stride between rows.

    The stride of a tensor with a single row is arbitrary, but the compiled code, and so the order of sums, depends on
    it. A single row therefore gets the stride of contiguous rows.
    """
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


@triton.jit
@no_type_check
def row_stats_kernel(
    stats, logits, columns, active, temperature, threshold, row_stride, num_columns,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one row of logits."""
    row = tl.program_id(0).to(tl.int64)  # N · V_local may exceed 32 bits
    logits += row * row_stride
    inverse = 1.0
    if temperature is not None:
        inverse = tl.div_rn(1.0, tl.load(temperature + row))
    lowest = None
    if threshold is not None:
        lowest = tl.load(threshold + row)

    # m is the maximum of the raw logits; s and t use powers of 2, with exponents y = (z − m)·(log2 e / T).
    row_max = -float("inf")
    s = 0.0
    t = 0.0
    target_x = 0.0
    if tl.load(active + row):
        scale = inverse * LOG2_E
        lanes: tl.constexpr = BLOCK // LANE
        offsets = tl.arange(0, lanes)[:, None] * LANE + tl.arange(0, LANE)[None, :]
        m = tl.full([lanes], -float("inf"), tl.float32)
        weights = tl.zeros([lanes], tl.float32)
        moments = tl.zeros([lanes], tl.float32)
        whole = num_columns // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            z = tl.load(logits + start + offsets)
            m, weights, moments = _accumulate(z, lowest, scale, m, weights, moments, ENTROPY)
        if whole < num_columns:
            z = tl.load(logits + whole + offsets, mask=whole + offsets < num_columns, other=-float("inf"))
            m, weights, moments = _accumulate(z, lowest, scale, m, weights, moments, ENTROPY)
        row_max = tl.max(m, axis=0)
        decay, moments = _move_maximum(m, row_max, scale, weights, moments, ENTROPY)
        s = tl.sum(weights * decay, axis=0)
        if ENTROPY:
            t = tl.sum(moments, axis=0) * LN_2
        column = tl.load(columns + row)
        if column >= 0:
            target_x = tl.load(logits + column).to(tl.float32) * inverse
        row_max *= inverse  # rounded like target_x, so their difference is exactly 0 if the target is likeliest
    stats += 4 * row
    tl.store(stats, row_max)
    tl.store(stats + 1, s)
    tl.store(stats + 2, t)
    tl.store(stats + 3, target_x)


@triton.jit
@no_type_check
def _accumulate(z, lowest, scale, m, weights, moments, ENTROPY: tl.constexpr):
    """Return (m, s, t) of each lane after one more block."""
    z = z.to(tl.float32)
    if lowest is not None:
        z = tl.where(z < lowest, -float("inf"), z)
    raised = tl.maximum(m, tl.max(z, axis=1))
    decay, moments = _move_maximum(m, raised, scale, weights, moments, ENTROPY)
    y = (z - tl.where(raised == -float("inf"), 0.0, raised)[:, None]) * scale
    weight = tl.exp2(y)
    if ENTROPY:
        moments += tl.sum(weight * tl.maximum(y, LOWEST_EXPONENT), axis=1)
    return raised, weights * decay + tl.sum(weight, axis=1), moments


@triton.jit
@no_type_check
def _move_maximum(m, raised, scale, weights, moments, ENTROPY: tl.constexpr):
    """Return, for each lane whose maximum rises from m to `raised`, the factor of s and the new t."""
    # If a lane has had only logits of −inf, its sums are 0 and stay 0. Its shift must be finite, because 0 · ∞ is NaN.
    shift = tl.where(m == -float("inf"), 0.0, (m - raised) * scale)
    decay = tl.exp2(shift)
    if ENTROPY:
        moments = tl.fma(shift, weights, moments) * decay
    return decay, moments


@triton.jit
@no_type_check
def row_gradients_kernel(
    out, logits, temperature, row_max, log_sum, base, entropy_grad, columns, column_grads, active, threshold,
    out_stride, row_stride, num_columns, num_targets, TARGETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one row of logits."""
    row = tl.program_id(0).to(tl.int64)
    out += row * out_stride
    logits += row * row_stride
    columns += row * num_targets
    column_grads += row * num_targets
    offsets = tl.arange(0, BLOCK)
    whole = num_columns // BLOCK * BLOCK
    if tl.load(active + row):
        inverse = 1.0
        if temperature is not None:
            inverse = tl.div_rn(1.0, tl.load(temperature + row))
        m = tl.load(row_max + row)
        log_s = tl.load(log_sum + row)
        slope = tl.load(base + row) * inverse
        bend = None
        if entropy_grad is not None:
            bend = tl.load(entropy_grad + row) * inverse
        lowest = None
        if threshold is not None:
            lowest = tl.load(threshold + row)

        if TARGETS == 1:
            target = tl.load(columns)
            target_grad = tl.load(column_grads) * inverse
        elif TARGETS > 1:
            slots = tl.arange(0, TARGETS)
            targets = tl.load(columns + slots, mask=slots < num_targets, other=-1)
            grads = tl.zeros([TARGETS], tl.float32)
            for index in range(num_targets):  # each duplicate of a column gets the sum
                grads += tl.where(targets == tl.load(columns + index), tl.load(column_grads + index), 0.0)
            target_z = tl.load(logits + targets, mask=targets >= 0, other=-float("inf"))
            values = _gradient(target_z, lowest, inverse, m, log_s, slope, bend) + grads * inverse
            tl.debug_barrier()  # all targets are read before another lane overwrites them

        for start in range(0, whole, BLOCK):
            at = start + offsets
            dz = _gradient(tl.load(logits + at), lowest, inverse, m, log_s, slope, bend)
            if TARGETS == 1:
                dz += tl.where(at == target, target_grad, 0.0)
            tl.store(out + at, dz.to(out.dtype.element_ty))
        if whole < num_columns:
            at = whole + offsets
            z = tl.load(logits + at, mask=at < num_columns, other=-float("inf"))
            dz = _gradient(z, lowest, inverse, m, log_s, slope, bend)
            if TARGETS == 1:
                dz += tl.where(at == target, target_grad, 0.0)
            tl.store(out + at, dz.to(out.dtype.element_ty), mask=at < num_columns)

        if TARGETS > 1:
            tl.debug_barrier()  # another lane may have written the same column, so this write must come last
            tl.store(out + targets, values.to(out.dtype.element_ty), mask=targets >= 0)
    else:
        zeros = tl.zeros([BLOCK], out.dtype.element_ty)
        for start in range(0, num_columns, BLOCK):
            tl.store(out + start + offsets, zeros, mask=start + offsets < num_columns)


@triton.jit
@no_type_check
def _gradient(z, lowest, inverse, m, log_s, slope, bend):
    """Return (1/T)·p·(A − g_H·ℓ), with slope = A/T and bend = g_H/T."""
    z = z.to(tl.float32)
    if lowest is not None:
        z = tl.where(z < lowest, -float("inf"), z)
    log_p = (z * inverse - m) - log_s
    p = tl.exp2(log_p * LOG2_E)
    if bend is not None:
        slope = tl.fma(-bend, tl.maximum(log_p, LOWEST_EXPONENT), slope)
    return p * slope


@triton.jit
@no_type_check
def local_columns_kernel(columns, ids, start, num_columns, num_ids, BLOCK: tl.constexpr):
    """Write the local columns of ids."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local = tl.load(ids + at, mask=at < num_ids, other=-1) - start
    tl.store(columns + at, tl.where((local >= 0) & (local < num_columns), local, -1), mask=at < num_ids)


@triton.jit
@no_type_check
def merge_rows_kernel(
    logprobs, row_entropy, row_max, log_sum, active, parts, ignored, part_stride, num_parts, num_rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the results of rows, from the statistics of all ranks."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    parts += 4 * rows.to(tl.int64)
    part_stride = part_stride.to(tl.int64)
    m = tl.full([BLOCK], -float("inf"), tl.float32)
    for part in range(num_parts):
        m = tl.maximum(m, tl.load(parts + part * part_stride, mask=inside, other=-float("inf")))
    finite = tl.where(m == -float("inf"), 0.0, m)
    s = tl.zeros([BLOCK], tl.float32)
    t = tl.zeros([BLOCK], tl.float32)
    x = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        of_part = parts + part * part_stride
        shift = tl.load(of_part, mask=inside, other=0.0) - finite
        part_s = tl.load(of_part + 1, mask=inside, other=0.0)
        weight = tl.exp2(shift * LOG2_E)
        s += weight * part_s
        if row_entropy is not None:  # an empty shard has shift −inf and s = 0: their product is NaN
            part_t = tl.load(of_part + 2, mask=inside, other=0.0)
            t += weight * (part_t + tl.where(part_s == 0, 0.0, shift) * part_s)
        x += tl.load(of_part + 3, mask=inside, other=0.0)
    is_ignored = tl.load(ignored + rows, mask=inside, other=1) != 0
    empty = s == 0
    m = tl.where(empty, 0.0, m)
    log_s = tl.log(tl.where(empty, 1.0, s))
    log_p = tl.where(empty, -float("inf"), (x - m) - log_s)
    tl.store(logprobs + rows, tl.where(is_ignored, 0.0, log_p), mask=inside)
    tl.store(row_max + rows, m, mask=inside)
    tl.store(log_sum + rows, log_s, mask=inside)
    is_active = (is_ignored | empty) == 0
    tl.store(active + rows, is_active, mask=inside)
    if row_entropy is not None:
        tl.store(row_entropy + rows, tl.where(is_active, log_s - tl.div_rn(t, s), 0.0), mask=inside)


@triton.jit
@no_type_check
def target_slopes_kernel(
    base, touched, target_grad, entropy_grad, entropy, active, num_rows, BLOCK: tl.constexpr
):  # fmt: skip
    """Write A of each row, and whether the row has a gradient."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    grad = tl.load(target_grad + rows, mask=inside, other=0.0)
    slope = -grad
    has_gradient = grad != 0
    if entropy_grad is not None:
        of_entropy = tl.load(entropy_grad + rows, mask=inside, other=0.0)
        slope = slope - of_entropy * tl.load(entropy + rows, mask=inside, other=0.0)
        has_gradient = has_gradient | (of_entropy != 0)
    tl.store(base + rows, slope, mask=inside)
    tl.store(touched + rows, has_gradient & (tl.load(active + rows, mask=inside, other=0) != 0), mask=inside)


INTERPRETED = not isinstance(row_stats_kernel, triton.runtime.JITFunction)

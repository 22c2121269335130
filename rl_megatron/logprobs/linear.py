"""`linear_logprobs`: a language model's head and the logprob kernels in one operator, without the full logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rl_megatron.logprobs.api import IGNORE_INDEX, LogprobStats, check_shapes, flatten_temperature, vocab_shard
from rl_megatron.logprobs.kernels.backends import choose_kernels
from rl_megatron.logprobs.token_blocks import BlockPlan, HiddenBlocks, HiddenGradient
from rl_megatron.logprobs.vocab_parallel import Upstream, differentiate_once, merge, read_logits

# The number of logits in a token block. On a GPU they have 512 MiB in bf16: thousands of rows, so that reading the
# weights for each block is cheap compared with the matrix products. On a CPU they have 32 MiB in bf16: about a hundred
# rows of the largest vocabularies, beyond which more rows are not faster.
BLOCK_ELEMENTS_CPU = 1 << 24
BLOCK_ELEMENTS_CUDA = 1 << 28

# On a CPU, torch cannot add the product of 16-bit matrices to an fp32 sum, so a block's gradient is copied to fp32, at
# most this many elements at a time.
WIDENED_ELEMENTS_CPU = 1 << 22


@dataclass(frozen=True)
class DeferredLogits:
    """A language model's output whose logits have not been computed. `linear_logprobs` computes their statistics.

    Attributes:
        hidden: The head's input, [S, B, H], or this rank's part of the first dimension under sequence parallelism.
        weight: The head's weight, [V/tp, H].
        sequence_shards: The number of sequence-parallel parts of the first dimension.
        block_tokens: See `linear_logprobs`.
    """

    hidden: Float[Tensor, "sequence_local batch hidden"]
    weight: Float[Tensor, "vocab_local hidden"]
    sequence_shards: int
    block_tokens: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the shape that the logits would have, [B, S, V/tp]."""
        return self.hidden.shape[1], self.hidden.shape[0] * self.sequence_shards, self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        """Return the device of the hidden states."""
        return self.hidden.device


def linear_logprobs(
    hidden: Float[Tensor, "*tokens_local hidden"],
    weight: Float[Tensor, "vocab_local hidden"],
    targets: Int[Tensor, "*tokens"],
    tp_group: dist.ProcessGroup | None = None,
    *,
    vocab_range: tuple[int, int] | None = None,
    valid_vocab_size: int | None = None,
    temperature: float | Float[Tensor, "*#tokens"] = 1.0,
    ignore_index: int = IGNORE_INDEX,
    entropy: bool = False,
    gather_ids: Int[Tensor, "*tokens ids"] | None = None,
    backend: str = "auto",
    block_tokens: int | None = None,
    chunk_tokens: int | None = None,
    sequence_parallel: bool = False,
    most_counted: int | None = None,
) -> LogprobStats:
    """Return `vocab_parallel_logprobs(hidden · weightᵀ, targets, …)`, computing logits one token block at a time.

        forward, block by block:   z = h·Wᵀ → (m, s, t, z_y) of each row → z is dropped
        backward, block by block:  z = h·Wᵀ again → dz in the same memory → dh = dz·W,  dW += dzᵀ·h

    The last block's logits are kept for backward, which starts with this block. Rows with target `ignore_index` are
    left out of every matrix product. On a GPU, the host waits once for the count of the other rows, unless
    `most_counted` is given.

    Memory: besides the results, dh and dW, it needs one block of logits, up to four blocks of hidden states, and 60
    bytes per token. For 16-bit weights without `main_grad` it also needs dW in fp32.

    Collectives over `tp_group`: forward runs those of `vocab_parallel_logprobs` once, not per block. Backward sums each
    block's dh over the ranks while the product for dW runs. With `sequence_parallel`, forward and backward gather each
    block of hidden states, and dh is reduce-scattered. The whole hidden states are never in memory.

    dW is summed in fp32. If megatron-core's DDP keeps a `main_grad` for the weight, dW is added to it directly, and
    autograd gets megatron-core's placeholder. The result of `torch.autograd.grad` for such a weight is meaningless.

    Shapes: hidden is [..., H], or with sequence_parallel [n/tp, ..., H] of [n, ..., H]; weight is [V_local, H] of the
    same dtype; targets are [...], not cut. Results are those of `vocab_parallel_logprobs`.

    Args:
        hidden: The head's input.
        weight: This rank's rows of the head's weight.
        targets: Global ids, or `ignore_index`.
        tp_group: The group over which the vocabulary is sharded; None: it is not sharded.
        vocab_range: See `vocab_parallel_logprobs`.
        valid_vocab_size: See `vocab_parallel_logprobs`.
        temperature: See `vocab_parallel_logprobs`.
        ignore_index: The target of rows to leave out.
        entropy: Whether to return the entropy.
        gather_ids: Global ids whose logprobs to return.
        backend: The backend of the logprob kernels. torch always computes the matrix products.
        block_tokens: The number of rows of a token block. None: so many that their bf16 logits take about 512 MiB on a
            GPU, or 32 MiB on a CPU.
        chunk_tokens: The name of `block_tokens` in other libraries.
        sequence_parallel: Whether the first dimension of hidden is cut over `tp_group`.
        most_counted: The number of rows whose target is not `ignore_index`; under sequence_parallel, the largest number
            on any rank of `tp_group`. None: it is computed, and the host waits for the device.

    Raises:
        ValueError: Shapes do not fit, block_tokens is below 1, or `vocab_parallel_logprobs` would raise.

    Source: the blocks follow Liger Kernel (Hsu et al. 2024, arXiv:2410.10989). The merge of the statistics is our own.
    """
    shards = tp_group.size() if sequence_parallel and tp_group is not None else 1
    _check_linear_shapes(hidden, weight, targets, shards)
    check_shapes(torch.Size((*targets.shape, len(weight))), targets, gather_ids)
    shard = vocab_shard(weight.shape[0], tp_group, vocab_range, valid_vocab_size)
    kernels = choose_kernels(backend, hidden.device)
    if chunk_tokens is not None:
        if block_tokens not in (None, chunk_tokens):
            raise ValueError(f"block_tokens={block_tokens} and chunk_tokens={chunk_tokens} differ; give only one")
        block_tokens = chunk_tokens
    if block_tokens is not None and block_tokens < 1:
        raise ValueError(f"block_tokens={block_tokens} must be at least 1; None chooses it from the vocabulary's size")
    width = torch.promote_types(hidden.dtype, torch.float32)
    temperatures = flatten_temperature(temperature, targets, list(range(targets.dim())), width)
    flat = targets.flatten()
    rows = block_tokens or default_block_tokens(weight.shape[0], weight.device.type)
    plan = BlockPlan.from_counts(flat != ignore_index, shards, rows, most_counted)

    selected = plan.select(flat, ignore_index)
    outputs = _LinearStats.apply(
        hidden.flatten(0, -2),
        weight,
        selected,
        None if gather_ids is None else plan.select(gather_ids.flatten(0, -2), 0),
        None if temperatures is None else plan.select(temperatures, 1.0),
        selected == ignore_index,
        HiddenBlocks(plan, tp_group if shards > 1 else None),
        shard,
        entropy,
        kernels,
    )
    whole = LogprobStats(*outputs).map(lambda rows: plan.restore(rows, flat.numel()))
    return whole.map(lambda rows: rows.view(*targets.shape, *rows.shape[1:]))


def _check_linear_shapes(
    hidden: Float[Tensor, "*tokens_local hidden"],
    weight: Float[Tensor, "vocab_local hidden"],
    targets: Int[Tensor, "*tokens"],
    shards: int,
) -> None:
    """Raise ValueError, naming the shapes, unless hidden, weight and targets fit together."""
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"weight must be [V_local, H] in the hidden states' dtype: hidden {tuple(hidden.shape)} {hidden.dtype}, "
            f"weight {tuple(weight.shape)} {weight.dtype}"
        )
    leading = (hidden.shape[0] * shards, *hidden.shape[1:-1]) if hidden.dim() > 1 else ()
    if hidden.dim() < 2 or tuple(targets.shape) != leading:
        over = f" over {shards} sequence parallel ranks" if shards > 1 else ""
        raise ValueError(
            f"targets must have the hidden states' leading shape{over}: targets {tuple(targets.shape)}, "
            f"hidden {tuple(hidden.shape)}"
        )


def default_block_tokens(vocab_shard: int, device_type: str) -> int:
    """Return the default number of rows of a token block, for a weight of `vocab_shard` rows on one rank.

    On a GPU ("cuda") it is a multiple of 1024.
    """
    if device_type == "cpu":
        return max(1, BLOCK_ELEMENTS_CPU // max(1, vocab_shard))
    return max(1024, BLOCK_ELEMENTS_CUDA // max(1, vocab_shard) // 1024 * 1024)


class _LinearStats(torch.autograd.Function):
    """(logprobs [n], entropy [n] or None, gathered [n, K] or None) at the n places of the plan."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, gather_ids, temperature, ignored, blocks, shard, entropy, kernels):
        """Compute the statistics block by block, and merge them over the ranks."""
        columns = kernels.local_columns(targets, shard.start, shard.num_columns)
        gather_columns = None
        if gather_ids is not None:
            gather_columns = kernels.local_columns(gather_ids, shard.start, shard.num_columns)
        width = torch.promote_types(hidden.dtype, torch.float32)
        stats = hidden.new_empty(len(targets), 4, dtype=width)
        gathered = None if gather_ids is None else hidden.new_empty(gather_ids.shape, dtype=width)
        scratch = hidden.new_empty(blocks.plan.longest, weight.shape[0])
        for rows, h in blocks.iterate(hidden):
            logits = torch.mm(h, weight.t(), out=scratch[: len(h)])
            rows_temperature = None if temperature is None else temperature[rows]
            stats[rows] = kernels.row_stats(
                logits, columns[rows], shard.num_columns, rows_temperature, entropy, ~ignored[rows]
            )
            if gathered is not None and gather_columns is not None:
                gathered[rows] = read_logits(logits, gather_columns[rows], rows_temperature, shard, kernels)
        if gathered is not None and shard.is_parallel:
            dist.all_reduce(gathered, group=shard.group)
        merged = merge(stats, gathered, targets, gather_ids, ignored, shard, entropy, kernels)

        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            hidden, weight, columns, gather_columns, temperature, merged.row_max, merged.log_sum, merged.entropy,
            merged.active,
        )  # fmt: skip
        ctx.blocks, ctx.shard, ctx.kernels = blocks, shard, kernels
        ctx.last_logits = scratch if any(ctx.needs_input_grad[:2]) else None
        return merged.logprobs, merged.entropy, merged.gathered

    @staticmethod
    @differentiate_once
    def backward(ctx, target_grad, entropy_grad, gathered_grads):
        """Return the gradients of hidden and weight, which are computed block by block in reverse order."""
        unused = (None,) * 8
        if target_grad is None and entropy_grad is None and gathered_grads is None:
            return None, None, *unused
        hidden, weight, columns, gather_columns, temperature, row_max, log_sum, entropy, active = ctx.saved_tensors
        upstream = Upstream.from_gradients(
            target_grad, entropy_grad, gathered_grads, columns, gather_columns, entropy, active, ctx.kernels
        )
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        sum_group = ctx.shard.group if ctx.shard.is_parallel else None
        hidden_grad = HiddenGradient(ctx.blocks, hidden, sum_group) if wants_hidden else None
        weight_grad = _WeightGradient(weight) if wants_weight else None
        last_logits, ctx.last_logits = ctx.last_logits, None
        scratch = hidden.new_empty(ctx.blocks.plan.longest, len(weight)) if last_logits is None else last_logits
        for rows, h in ctx.blocks.iterate(hidden, reverse=True):
            logits = scratch[: len(h)]
            if last_logits is None:
                torch.mm(h, weight.t(), out=logits)
            last_logits = None  # forward kept the logits of one block only
            rows_temperature = None if temperature is None else temperature[rows]
            ctx.kernels.write_row_gradients(
                logits, logits, ctx.shard.num_columns, rows_temperature, row_max[rows], log_sum[rows],
                *upstream.select_rows(rows),
            )  # fmt: skip
            if hidden_grad is not None:
                hidden_grad.add(rows, logits, weight)  # the sum of dh over ranks overlaps with the product for dW
            if weight_grad is not None:
                weight_grad.add(logits, h)
        scratch = logits = None  # free the block before the equally large placeholder for dW is allocated
        return (
            None if hidden_grad is None else hidden_grad.finish(),
            None if weight_grad is None else weight_grad.finish(),
            *unused,
        )


def add_weight_gradient(
    total: Float[Tensor, "vocab_local hidden"],
    dz: Float[Tensor, "rows vocab_local"],
    hidden: Float[Tensor, "rows hidden"],
) -> None:
    """Add dzᵀ·h, the gradient of the weight of z = h·Wᵀ, to `total`, in the precision of `total` (fp32 for bf16)."""
    if total.dtype == dz.dtype:
        total.addmm_(dz.t(), hidden)
    elif dz.device.type == "cuda":
        torch.addmm(total, dz.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        hidden = hidden.to(total.dtype)
        step = max(1, WIDENED_ELEMENTS_CPU // max(1, len(dz)))
        for start in range(0, dz.shape[1], step):
            columns = slice(start, start + step)
            total[columns].addmm_(dz[:, columns].to(total.dtype).t(), hidden)


class _WeightGradient:
    """The sum of dW over token blocks in fp32. It is the weight's `main_grad` if megatron-core's DDP keeps one."""

    def __init__(self, weight: Float[Tensor, "vocab_local hidden"]):
        self._weight = weight
        main_grad: Tensor | None = getattr(weight, "main_grad", None)
        if main_grad is not None and hasattr(weight, "grad_added_to_main_grad"):
            self._in_main_grad, self._sum = True, main_grad
        else:
            self._in_main_grad = False
            self._sum = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    def add(self, dz: Float[Tensor, "rows vocab_local"], hidden: Float[Tensor, "rows hidden"]) -> None:
        """Add dzᵀ·h to the sum."""
        add_weight_gradient(self._sum, dz, hidden)

    def finish(self) -> Float[Tensor, "vocab_local hidden"]:
        """Return dW in the weight's dtype, or megatron-core's placeholder if the sum is in `main_grad`."""
        if not self._in_main_grad:
            return self._sum.to(self._weight.dtype)
        # This follows megatron-core's own linear layers: DDP's hook must run, but must not add dW a second time. If the
        # weight is also the embedding, the hook adds what autograd accumulated, the embedding's gradient plus this
        # placeholder, which must then be 0. The attribute is megatron-core's, not torch's.
        self._weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
        zero_out = getattr(self._weight, "zero_out_wgrad", False)
        return torch.zeros_like(self._weight) if zero_out else torch.empty_like(self._weight)

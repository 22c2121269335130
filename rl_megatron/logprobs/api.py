"""`vocab_parallel_logprobs`: the public operator, its arguments checked and flattened to rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from rl_megatron.logprobs.filtered import FilteredStats
from rl_megatron.logprobs.flatten import from_rows, may_be_overwritten, memory_order, to_rows
from rl_megatron.logprobs.kernels.backends import choose_kernels
from rl_megatron.logprobs.sampling_filter import SamplingFilter
from rl_megatron.logprobs.vocab_parallel import VocabParallelStats, VocabShard, check

IGNORE_INDEX = -100


class LogprobStats(NamedTuple):
    """Per-token results in fp32 (fp64 where the logits are fp64), differentiable, the same on every rank of the group.

    logprobs: log p(target), the targets' shape.
    entropy: −Σ_v p_v·log p_v, the targets' shape, or None if not asked for.
    gathered: log p(gather_ids), the targets' shape + [K], or None if not asked for.
    """

    logprobs: Float[Tensor, "*tokens"]
    entropy: Float[Tensor, "*tokens"] | None = None
    gathered: Float[Tensor, "*tokens ids"] | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> LogprobStats:
        """Return these statistics with `function` applied to each one that was asked for."""
        return LogprobStats(
            function(self.logprobs),
            None if self.entropy is None else function(self.entropy),
            None if self.gathered is None else function(self.gathered),
        )


def vocab_parallel_logprobs(
    logits: Float[Tensor, "*tokens vocab_local"],
    targets: Int[Tensor, "*tokens"],
    tp_group: dist.ProcessGroup | None = None,
    *,
    vocab_range: tuple[int, int] | None = None,
    valid_vocab_size: int | None = None,
    temperature: float | Float[Tensor, "*#tokens"] = 1.0,
    ignore_index: int = IGNORE_INDEX,
    entropy: bool = False,
    gather_ids: Int[Tensor, "*tokens ids"] | None = None,
    sampling_filter: SamplingFilter | None = None,
    backend: str = "auto",
) -> LogprobStats:
    """Log-probabilities of the targets under softmax(logits / T), and on request entropy and logprobs of K more ids.

        x = logits / T,  M = max_v x_v,  s = Σ_v e^{x_v−M},  t = Σ_v e^{x_v−M}·(x_v−M)
        log p(y) = (x_y − M) − log s        H = log s − t/s

    over the whole vocabulary, whose columns are sharded over `tp_group`. Forward: one read of the logits, one
    all-gather of 16 bytes per token and rank (and one all-reduce of 4·K bytes per token with `gather_ids`); nothing of
    the logits' size is allocated. Backward: no collective, one read and one write. All arithmetic is fp32, rounded once
    to the logits' dtype.

    The backward pass turns the logits' buffer into their gradient. Whoever else saved the logits for backward must have
    run by then; autograd's version counter guards this in both directions, so misuse raises and never corrupts. A
    second backward raises. Leaf tensors (and views of one) are the caller's data: they keep their values, their
    gradient gets its own memory, and they may be differentiated twice. So may logits whose rows share memory, and all
    logits under saved-tensor hooks, which switch that guard off (a non-reentrant activation checkpoint is one). Without
    grad mode the logits are only read. Logits whose leading dimensions are merely permuted ([S, B, V] seen as
    [B, S, V]) are used in place; any other strided view (a slice such as `logits[:, :-1]`) is copied first: mark
    positions to leave out with `ignore_index`.

    Rows with target `ignore_index` have logprob 0, entropy 0 and gradient exactly 0, whatever their logits, NaN
    included. Rows that receive no upstream gradient are written as zeros without being read. Logits of −inf have
    probability 0 and gradient 0 apart from the target's own; a row of nothing but −inf has logprob −inf, entropy 0 and
    gradient 0.

    With a `sampling_filter` all of this is said of the distribution that top-k and top-p leave, renormalised: the
    softmax of the logits x_v ≥ τ alone, τ being found from the logits as they are and constant to the gradient (see
    `filter_thresholds`, also for the further reads and all-reduces that it costs). Tokens below τ have probability and
    gradient 0, gathered ids among them logprob −inf. A target below τ has gradient 0 and logprob −inf, is added to the
    distribution, or makes its row an ignored one, as `SamplingFilter.outside` says. A filter that is off is no filter.

    Shapes: logits [..., V_local]; targets [...] global ids; temperature a positive number, or a tensor that broadcasts
        to [...]; gather_ids [..., K] global ids, duplicates and the target allowed.
    Units: nats.
    Args: vocab_range=(start, stop), this rank's ids where shards are uneven (default: equal shards in rank order).
        valid_vocab_size: ids from here on are padding; they enter no softmax, entropy or gradient, and a rank may hold
        nothing else. backend: "auto" or one of `BACKENDS` (see `choose_kernels`).
    Raises: ValueError for shapes that do not fit, shards that do not tile the vocabulary, and targets or gather_ids
        outside it (on a GPU these last two are asynchronous device assertions: nothing waits for the check).
    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867); the entropy's
        shifted first moment t is merged across shards in the same way.
    """
    check_shapes(logits.shape, targets, gather_ids)
    shard = vocab_shard(logits.shape[-1], tp_group, vocab_range, valid_vocab_size)
    kernels = choose_kernels(backend, logits.device)
    order = memory_order(logits)
    rows, row_targets = to_rows(logits, order), to_rows(targets[..., None], order)[:, 0]
    row_ids = None if gather_ids is None else to_rows(gather_ids, order)
    temperatures = row_temperature(temperature, targets, order, torch.promote_types(logits.dtype, torch.float32))
    given = (
        rows, row_targets, row_ids, temperatures, row_targets == ignore_index, shard, entropy, kernels,
        may_be_overwritten(rows),
    )  # fmt: skip
    if sampling_filter is None or sampling_filter.is_off:
        outputs = VocabParallelStats.apply(*given)
    else:
        outputs = FilteredStats.apply(*given, sampling_filter)
    return LogprobStats(*outputs).map(lambda rows: from_rows(rows, targets.shape, order))


def check_shapes(
    logits: torch.Size, targets: Int[Tensor, "*tokens"], gather_ids: Int[Tensor, "*tokens ids"] | None
) -> None:
    """Raise ValueError, naming the shapes, unless targets and gather_ids fit logits of this shape."""
    if targets.shape != logits[:-1]:
        raise ValueError(
            f"targets must have the logits' leading shape: targets {tuple(targets.shape)}, logits {tuple(logits)}"
        )
    if gather_ids is not None and gather_ids.shape[:-1] != targets.shape:
        raise ValueError(
            f"gather_ids must be the targets' shape + [K]: gather_ids {tuple(gather_ids.shape)}, "
            f"targets {tuple(targets.shape)}"
        )


def vocab_shard(
    num_local: int,
    group: dist.ProcessGroup | None,
    vocab_range: tuple[int, int] | None,
    valid_vocab_size: int | None,
) -> VocabShard:
    """Return this rank's shard of the vocabulary; raise ValueError for a range that does not fit the columns."""
    rank = dist.get_rank(group) if group is not None else 0
    start, stop = vocab_range or (rank * num_local, (rank + 1) * num_local)
    if stop - start != num_local:
        raise ValueError(f"vocab_range=({start}, {stop}) spans {stop - start} ids, the logits have {num_local} columns")
    if valid_vocab_size is not None and valid_vocab_size <= 0:
        raise ValueError(f"valid_vocab_size={valid_vocab_size} must be positive")
    shard = VocabShard(start, stop, valid_vocab_size, group)
    if not shard.is_parallel and start != 0:
        raise ValueError(f"vocab_range=({start}, {stop}): without a tp_group nobody holds the ids below {start}")
    return shard


def row_temperature(
    temperature: float | Float[Tensor, "*#tokens"],
    targets: Int[Tensor, "*tokens"],
    order: list[int],
    dtype: torch.dtype,
) -> Float[Tensor, " rows"] | None:
    """Return the temperature of each row, or None for 1 (the division is then skipped)."""
    if not isinstance(temperature, Tensor):
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature={temperature} must be positive and finite; greedy decoding has no logprobs")
        if temperature == 1:
            return None
        return torch.full((targets.numel(),), temperature, dtype=dtype, device=targets.device)
    if temperature.requires_grad:
        raise ValueError("temperature must not require a gradient: none is computed for it")
    given = temperature
    check(
        ((given > 0) & given.isfinite()).all(),
        lambda: f"temperature must be positive and finite, got {given.min().item()} … {given.max().item()}",
    )
    try:
        temperature = torch.broadcast_to(given.to(targets.device, dtype), targets.shape)
    except RuntimeError as error:
        raise ValueError(
            f"temperature {tuple(given.shape)} must be a number or broadcast to targets {tuple(targets.shape)}"
        ) from error
    return to_rows(temperature[..., None], order)[:, 0]

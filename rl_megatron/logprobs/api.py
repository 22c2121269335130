"""`vocab_parallel_logprobs`, the public operator, which checks its arguments and flattens them to rows."""

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
    """Per-token results in fp32 (fp64 for fp64 logits). They are differentiable, and the same on every tp rank.

    Attributes:
        logprobs: log p(target), in the targets' shape.
        entropy: −Σ_v p_v·log p_v, in the targets' shape, or None if it was not requested.
        gathered: log p(gather_ids), in the targets' shape + [K], or None if it was not requested.
    """

    logprobs: Float[Tensor, "*tokens"]
    entropy: Float[Tensor, "*tokens"] | None = None
    gathered: Float[Tensor, "*tokens ids"] | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> LogprobStats:
        """Return these statistics with `function` applied to each one that was requested."""
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
    """Return the logprobs of the targets under softmax(logits / T), and optionally the entropy and other ids' logprobs.

        x = logits / T,  M = max_v x_v,  s = Σ_v e^{x_v−M},  t = Σ_v e^{x_v−M}·(x_v−M)
        log p(y) = (x_y − M) − log s        H = log s − t/s

    Sums are over the whole vocabulary, whose columns are sharded over `tp_group`. All results are in nats.

    Cost: forward reads the logits once and makes one all-gather of 16 bytes per token and rank; `gather_ids` adds one
    all-reduce of 4·K bytes per token. Backward reads the logits and writes the gradient once, without a collective. No
    buffer of the logits' size is allocated. All arithmetic is in fp32 (fp64 for fp64 logits); the gradient is rounded
    once to the logits' dtype.

    Memory: backward overwrites the logits' buffer with their gradient. Another operation that saved the logits for its
    own backward must therefore run its backward first. Autograd's version counter checks this in both directions, so
    that misuse raises an error instead of giving wrong gradients. A second backward raises too. In three cases the
    gradient gets its own memory instead, and backward may run twice: the logits are a leaf or a view of one; their rows
    share memory; saved-tensor hooks are active, which disable the version check (as in a non-reentrant activation
    checkpoint). Without grad mode, the logits are only read.

    Strides: logits with permuted leading dimensions ([S, B, V] seen as [B, S, V]) are used in place. Any other strided
    view, such as the slice `logits[:, :-1]`, is copied first; set targets to `ignore_index` instead of slicing.

    Special values: rows whose target is `ignore_index` have logprob 0, entropy 0 and gradient exactly 0, whatever their
    logits are, including NaN. Rows without upstream gradient get gradient 0 without being read. Logits of −inf have
    probability 0, and gradient 0 except at the target. A row with only −inf has logprob −inf, entropy 0 and gradient 0.

    Filter: with a `sampling_filter` the distribution is the softmax over only the tokens that top-k and top-p keep,
    which are those with x_v ≥ τ. τ is a constant in the gradient. `filter_thresholds` describes how τ is found, and the
    further reads and all-reduces that this needs. Tokens below τ have probability and gradient 0, and logprob −inf if
    gathered. `SamplingFilter.outside` selects the logprob of a target below τ. A filter that is off has no effect.

    Shapes: logits [..., V_local]; targets [...]; temperature a number or a tensor that broadcasts to [...]; gather_ids
    [..., K].

    Args:
        logits: This rank's columns of the logits.
        targets: Global ids, or `ignore_index`.
        tp_group: The group over which the vocabulary is sharded; None: it is not sharded.
        vocab_range: This rank's ids (start, stop) if shards are uneven. None: shards are equal and in rank order.
        valid_vocab_size: Ids from this one on are padding. They are in no softmax, entropy or gradient. A rank may have
            only padding.
        temperature: T, a positive number per row. It has no gradient.
        ignore_index: The target of rows to leave out.
        entropy: Whether to return the entropy.
        gather_ids: Global ids whose logprobs to return. They may repeat, and may include the target.
        sampling_filter: The top-k and top-p filter of the distribution.
        backend: "auto" or one of `BACKENDS` (see `choose_kernels`).

    Raises:
        ValueError: Shapes do not fit, shards do not tile the vocabulary, or targets or gather_ids are outside it. On a
            GPU all but the shapes are checked by asynchronous device assertions, so that the host does not wait.

    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867). The entropy's
    shifted first moment t is merged across shards in the same way.
    """
    check_shapes(logits.shape, targets, gather_ids)
    shard = vocab_shard(logits.shape[-1], tp_group, vocab_range, valid_vocab_size)
    kernels = choose_kernels(backend, logits.device)
    order = memory_order(logits)
    rows, row_targets = to_rows(logits, order), to_rows(targets[..., None], order)[:, 0]
    row_ids = None if gather_ids is None else to_rows(gather_ids, order)
    temperatures = flatten_temperature(temperature, targets, order, torch.promote_types(logits.dtype, torch.float32))
    arguments = (
        rows, row_targets, row_ids, temperatures, row_targets == ignore_index, shard, entropy, kernels,
        may_be_overwritten(rows),
    )  # fmt: skip
    if sampling_filter is None or sampling_filter.is_off:
        outputs = VocabParallelStats.apply(*arguments)
    else:
        outputs = FilteredStats.apply(*arguments, sampling_filter)
    return LogprobStats(*outputs).map(lambda rows: from_rows(rows, targets.shape, order))


def check_shapes(
    logits: torch.Size, targets: Int[Tensor, "*tokens"], gather_ids: Int[Tensor, "*tokens ids"] | None
) -> None:
    """Check that targets and gather_ids are integers and fit logits of this shape."""
    for name, ids in (("targets", targets), ("gather_ids", gather_ids)):
        if ids is not None and (ids.is_floating_point() or ids.dtype is torch.bool):
            raise ValueError(f"{name} must be integers, got {ids.dtype}")
    if targets.shape != logits[:-1]:
        raise ValueError(
            f"targets must have the logits' leading shape: targets {tuple(targets.shape)}, logits {tuple(logits)}"
        )
    if gather_ids is not None and gather_ids.shape[:-1] != targets.shape:
        raise ValueError(
            f"gather_ids must have the targets' shape + [K]: gather_ids {tuple(gather_ids.shape)}, "
            f"targets {tuple(targets.shape)}"
        )


def vocab_shard(
    num_local: int,
    group: dist.ProcessGroup | None,
    vocab_range: tuple[int, int] | None,
    valid_vocab_size: int | None,
) -> VocabShard:
    """Return this rank's shard of the vocabulary, which has `num_local` columns.

    The other arguments are those of `vocab_parallel_logprobs`.
    """
    rank = dist.get_rank(group) if group is not None else 0
    start, stop = vocab_range or (rank * num_local, (rank + 1) * num_local)
    if stop - start != num_local:
        raise ValueError(
            f"vocab_range=({start}, {stop}) spans {stop - start} ids, but the logits have {num_local} columns"
        )
    if valid_vocab_size is not None and valid_vocab_size <= 0:
        raise ValueError(f"valid_vocab_size={valid_vocab_size} must be positive")
    shard = VocabShard(start, stop, valid_vocab_size, group)
    if not shard.is_parallel and start != 0:
        raise ValueError(f"vocab_range=({start}, {stop}) must start at 0 without a tp_group: no rank has the ids below")
    return shard


def flatten_temperature(
    temperature: float | Float[Tensor, "*#tokens"],
    targets: Int[Tensor, "*tokens"],
    order: list[int],
    dtype: torch.dtype,
) -> Float[Tensor, " rows"] | None:
    """Check the temperature, and return it for each row, or None if it is the number 1 (no division is needed).

    A tensor broadcasts to the shape of `targets`, whose values are not read. `order` lists the leading dimensions in
    memory order.
    """
    if not isinstance(temperature, Tensor):
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(
                f"temperature={temperature} must be positive and finite; greedy decoding does not have logprobs"
            )
        if temperature == 1:
            return None
        return torch.full((targets.numel(),), temperature, dtype=dtype, device=targets.device)
    if temperature.requires_grad:
        raise ValueError("temperature must not require a gradient, because none is computed for it")
    check(
        ((temperature > 0) & temperature.isfinite()).all(),
        lambda: f"temperature must be positive and finite, got {temperature.min().item()} … {temperature.max().item()}",
    )
    try:
        whole = torch.broadcast_to(temperature.to(targets.device, dtype), targets.shape)
    except RuntimeError as error:
        raise ValueError(
            f"temperature {tuple(temperature.shape)} must be a number or broadcast to targets {tuple(targets.shape)}"
        ) from error
    return to_rows(whole[..., None], order)[:, 0]

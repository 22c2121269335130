"""The search of a threshold of each row of logits, digit by digit of its bits, without sorting or gathering logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.logprobs.kernels.float_order import from_ordered_bits, ordered_bits
from rl_megatron.logprobs.kernels.tiles import row_blocks
from rl_megatron.logprobs.vocab_parallel import VocabShard

COPIES = 4  # a block of rows needs this many times its fp32 size: its positions and weights are int64

_DIGIT_BITS = 8  # the bits of a threshold that one round finds
_NUM_DIGITS = 1 << _DIGIT_BITS


def largest_threshold(
    logits: Float[Tensor, "rows vocab_local"],
    shard: VocabShard,
    active: Bool[Tensor, " rows"],
    weigh: Callable[[Tensor, slice], Tensor],
    needed: Callable[[Tensor], Tensor],
) -> Float[Tensor, " rows"]:
    """Return the largest τ [N] with Σ_{x_v ≥ τ} weight_v ≥ needed(Σ_v weight_v), or −inf if there is none.

    Each round sums the weights for each of the 256 values of the next digit: 2 rounds for 16-bit logits, 4 for fp32 and
    8 for fp64. A round reads the logits once, in blocks of rows, and makes one all-reduce of 2 KiB per row.

    Args:
        logits: This rank's columns of the logits.
        shard: This rank's shard of the vocabulary.
        active: The rows that need a threshold.
        weigh: Returns the int64 weights of a block of logits, given the logits and their rows.
        needed: Returns the weight that each row must reach, given the rows' sums of weights.
    """
    # The leading digit includes the sign, so its lowest value is negative.
    first = logits.new_full(active.shape, -_NUM_DIGITS // 2, dtype=torch.int64)
    prefix = total = remaining = None
    for shift in range(torch.finfo(logits.dtype).bits - _DIGIT_BITS, -1, -_DIGIT_BITS):
        if prefix is not None:
            first = prefix * _NUM_DIGITS
        histogram = _histogram(logits, shard, active, weigh, first, shift)
        if shard.is_parallel:
            dist.all_reduce(histogram, group=shard.group)
        at_least = histogram.flip(1).cumsum(1).flip(1)  # the weight of this digit and all larger ones
        if total is None or remaining is None:
            total = at_least[:, 0]
            remaining = needed(total)
        digit = (at_least >= remaining[:, None]).sum(dim=1).sub(1).clamp(min=0)
        remaining = remaining - (at_least - histogram).gather(1, digit[:, None])[:, 0]
        prefix = first + digit
    assert prefix is not None and total is not None  # floating-point numbers have at least one digit
    thresholds = from_ordered_bits(prefix, logits.dtype).to(torch.promote_types(logits.dtype, torch.float32))
    return thresholds.masked_fill((total == 0) | thresholds.isnan() | ~active, -torch.inf)


def _histogram(
    logits: Float[Tensor, "rows vocab_local"],
    shard: VocabShard,
    active: Bool[Tensor, " rows"],
    weigh: Callable[[Tensor, slice], Tensor],
    first: Int[Tensor, " rows"],
    shift: int,
) -> Int[Tensor, "rows digits"]:
    """Return this shard's weight of the logits with (ordered bits >> shift) = first + j, for each of 256 digits j."""
    # One more position at either end takes the logits with smaller and larger prefixes.
    histogram = torch.zeros(len(active), _NUM_DIGITS + 2, dtype=torch.int64, device=logits.device)
    if shard.num_columns:
        for block, skip in row_blocks(active, shard.num_columns * COPIES):
            if skip:
                continue
            x = logits[block, : shard.num_columns]
            position = (ordered_bits(x) >> shift).long().sub_(first[block, None] - 1).clamp_(0, _NUM_DIGITS + 1)
            histogram[block].scatter_add_(1, position, weigh(x, block))
    return histogram[:, 1:-1].contiguous()

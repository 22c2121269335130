"""What top-k and top-p leave of a distribution, as one threshold for each token's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.logprobs.kernels.float_order import from_ordered_bits, ordered_bits
from rl_megatron.logprobs.kernels.tiles import row_blocks
from rl_megatron.logprobs.vocab_parallel import VocabShard

Outside = Literal["minus_infinity", "keep", "ignore"]

_DIGIT_BITS = 8  # of a threshold found in a round
_NUM_DIGITS = 1 << _DIGIT_BITS

_COPIES = 4  # of a tile's size in fp32 that a block of rows is worked on with: int64 places and weights

# Masses are counted in this fraction of the likeliest token's: their sums are exact up to 2^22 ids, hence the same
# however they are ordered or sharded, and what is too small to count has a mass of 1e-7 among a hundred thousand ids.
_MASS_UNIT = 2.0**-40


@dataclass(frozen=True)
class SamplingFilter:
    """The tokens that a sampler draws from: the top_k likeliest, and of these the fewest, likeliest first, whose share
    of their mass reaches top_p; one at least.

    top_k: None is off. top_p: 1 is off. Equally likely tokens stay or go together, so that there may be more of them
    than top_k, and than top_p asks for.
    outside: what the logprob of a target is that the filter leaves out. "minus_infinity": −inf, which is what its
        sampler would say of it. "keep": the target is counted among the tokens that are left, in every sum, so that its
        logprob is finite. "ignore": 0, as if the target were `ignore_index`.
    """

    top_k: int | None = None
    top_p: float = 1.0
    outside: Outside = "minus_infinity"

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or None to be off")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 is off")
        if self.outside not in get_args(Outside):
            raise ValueError(f"outside={self.outside!r} is none of {get_args(Outside)}")

    @property
    def is_off(self) -> bool:
        return self.top_k is None and self.top_p == 1


@torch.no_grad()
def filter_thresholds(
    logits: Float[Tensor, "rows vocab_local"],
    sampling_filter: SamplingFilter,
    shard: VocabShard,
    temperature: Float[Tensor, " rows"] | None,
    active: Bool[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """Return τ [N] on the logits before the temperature: the filter leaves the tokens with x ≥ τ.

        top-k:  the largest τ with #{v : x_v ≥ τ} ≥ k
        top-p:  the largest τ with Σ_{x_v ≥ τ} w_v ≥ p·Σ_v w_v,   w_v = e^{(x_v−M)/T},  over what top-k leaves

    τ is one of the row's own logits, found digit by digit of its bits: each round counts, for each of 256 values of the
    next digit, the tokens or the mass that have it. Nothing is sorted or gathered. A filter takes 2 rounds for 16-bit
    logits, 4 for fp32 and 8 for fp64, each one read of the logits in blocks of rows and one all-reduce of 2 KiB per
    row; top-p takes one more all-reduce, of M. The same bits on every rank. Takes part in no gradient.

    τ is −inf in rows that are not active, whatever their logits, and where no number will do: for top-p in rows with
    NaN, +inf, or nothing but −inf.

    A temperature of None is 1. τ is fp32 (fp64 for fp64).

    Source: Fan, Lewis & Dauphin 2018 (arXiv:1805.04833) for top-k; Holtzman et al. 2020, "The Curious Case of Neural
        Text Degeneration" (arXiv:1904.09751) for top-p.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    thresholds = logits.new_full(active.shape, -torch.inf, dtype=dtype)
    top_k = sampling_filter.top_k
    if top_k is not None:
        count = torch.ones((), dtype=torch.int64, device=logits.device)
        thresholds = _largest_threshold(
            logits,
            shard,
            active,
            weigh=lambda x, block: count.expand(x.shape),
            needed=lambda total: total.clamp(max=top_k),
        )
    if sampling_filter.top_p < 1:
        thresholds = _top_p_thresholds(logits, sampling_filter.top_p, shard, temperature, active, thresholds)
    return thresholds


def _top_p_thresholds(
    logits: Float[Tensor, "rows vocab_local"],
    top_p: float,
    shard: VocabShard,
    temperature: Float[Tensor, " rows"] | None,
    active: Bool[Tensor, " rows"],
    lowest: Float[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """Return the thresholds of top-p among the logits that are at least `lowest`."""
    row_max = torch.full_like(lowest, -torch.inf)
    if shard.num_columns:
        row_max = logits[:, : shard.num_columns].amax(dim=-1).to(lowest.dtype)
    if shard.is_parallel:
        dist.all_reduce(row_max, op=dist.ReduceOp.MAX, group=shard.group)

    def weigh(x: Float[Tensor, "rows columns"], block: slice) -> Int[Tensor, "rows columns"]:
        shifted = x.to(lowest.dtype) - row_max[block, None]
        if temperature is not None:
            shifted /= temperature[block, None]
        mass = shifted.exp_().masked_fill_(x < lowest[block, None], 0.0)
        return mass.mul_(1 / _MASS_UNIT).nan_to_num_(nan=0.0).long()

    found = _largest_threshold(
        logits, shard, active, weigh, needed=lambda total: (total.double() * top_p).ceil().long().clamp(min=1)
    )
    return torch.maximum(found, lowest)


def _largest_threshold(
    logits: Float[Tensor, "rows vocab_local"],
    shard: VocabShard,
    active: Bool[Tensor, " rows"],
    weigh: Callable[[Tensor, slice], Tensor],
    needed: Callable[[Tensor], Tensor],
) -> Float[Tensor, " rows"]:
    """Return the largest τ [N] with Σ_{x_v ≥ τ} weight_v ≥ needed(Σ_v weight_v), −inf where that is in vain.

    weigh: a block of logits and its rows → int64 weights. needed: the rows' sums [N] → what must be reached.
    """
    # The leading digit has the sign, and counts from its lowest value.
    first = logits.new_full(active.shape, -_NUM_DIGITS // 2, dtype=torch.int64)
    prefix = total = remaining = None
    for shift in range(torch.finfo(logits.dtype).bits - _DIGIT_BITS, -1, -_DIGIT_BITS):
        if prefix is not None:
            first = prefix * _NUM_DIGITS
        histogram = _histogram(logits, shard, active, weigh, first, shift)
        if shard.is_parallel:
            dist.all_reduce(histogram, group=shard.group)
        at_least = histogram.flip(1).cumsum(1).flip(1)  # weight of this digit and of larger ones
        if total is None or remaining is None:
            total = at_least[:, 0]
            remaining = needed(total)
        digit = (at_least >= remaining[:, None]).sum(dim=1).sub(1).clamp(min=0)
        remaining = remaining - (at_least - histogram).gather(1, digit[:, None])[:, 0]
        prefix = first + digit
    assert prefix is not None and total is not None  # floating-point numbers have at least one digit
    found = from_ordered_bits(prefix, logits.dtype).to(torch.promote_types(logits.dtype, torch.float32))
    return found.masked_fill((total == 0) | found.isnan() | ~active, -torch.inf)


def _histogram(
    logits: Float[Tensor, "rows vocab_local"],
    shard: VocabShard,
    active: Bool[Tensor, " rows"],
    weigh: Callable[[Tensor, slice], Tensor],
    first: Int[Tensor, " rows"],
    shift: int,
) -> Int[Tensor, "rows digits"]:
    """Return, for each of 256 digits j, this shard's int64 weight with (ordered bits >> shift) = origin + j."""
    # A place at either end takes the logits of smaller and of larger prefixes.
    histogram = torch.zeros(len(active), _NUM_DIGITS + 2, dtype=torch.int64, device=logits.device)
    if shard.num_columns:
        for block, skip in row_blocks(active, shard.num_columns * _COPIES):
            if skip:
                continue
            x = logits[block, : shard.num_columns]
            place = (ordered_bits(x) >> shift).long().sub_(first[block, None] - 1).clamp_(0, _NUM_DIGITS + 1)
            histogram[block].scatter_add_(1, place, weigh(x, block))
    return histogram[:, 1:-1].contiguous()

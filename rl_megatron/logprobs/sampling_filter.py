"""Top-k and top-p filters of a distribution, as one threshold per row of logits.

A threshold is found among the likeliest tokens, or by a search of its bits, without sorting or gathering all logits.
"""

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
from rl_megatron.topology.collectives import gather_from_ranks

Outside = Literal["minus_infinity", "keep", "ignore"]

# Masses are integers, in units of this fraction of the likeliest token's mass. Sums over up to 2^22 ids are then exact,
# and so the same in every order and sharding. Over a hundred thousand ids, the masses that are rounded down to 0 sum to
# at most 1e-7 of the likeliest token's mass.
_MASS_SCALE = 2.0**-40

_COPIES = 4  # a block of rows needs this many times its fp32 size: its positions and weights are int64
_DIGIT_BITS = 8  # the bits of a threshold that one round of the search finds
_NUM_DIGITS = 1 << _DIGIT_BITS


@dataclass(frozen=True)
class SamplingFilter:
    """A filter that keeps the tokens a sampler draws from.

    It keeps the top_k likeliest tokens and, of these, the likeliest until their share of the mass reaches top_p. At
    least one token is kept. Equally likely tokens are kept or left out together, so more tokens may be kept than top_k
    and top_p require.

    Attributes:
        top_k: The number of likeliest tokens; None disables top-k.
        top_p: The share of the mass, in (0, 1]; 1 disables top-p.
        outside: The logprob of a target that the filter leaves out. "minus_infinity": −inf, as in the sampler. "keep":
            the target counts as kept in every sum, so that its logprob is finite. "ignore": 0, as if the target were
            `ignore_index`.
    """

    top_k: int | None = None
    top_p: float = 1.0
    outside: Outside = "minus_infinity"

    def __post_init__(self) -> None:
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            raise ValueError(f"top_k={self.top_k} must be a whole number of at least 1, or None to disable it")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]; 1 disables it")
        if self.outside not in get_args(Outside):
            raise ValueError(f"outside={self.outside!r} must be one of {get_args(Outside)}")

    @property
    def is_off(self) -> bool:
        """Return whether the filter keeps every token."""
        return self.top_k is None and self.top_p == 1


@torch.no_grad()
def filter_thresholds(
    logits: Float[Tensor, "rows vocab_local"],
    sampling_filter: SamplingFilter,
    shard: VocabShard,
    temperature: Float[Tensor, " rows"] | None,
    active: Bool[Tensor, " rows"],
    num_candidates: int = 1024,
) -> Float[Tensor, " rows"]:
    """Return the threshold τ of each row's logits x, [N]: the filter keeps tokens with x ≥ τ. x is not divided by T.

        top-k:  the largest τ with #{v : x_v ≥ τ} ≥ k
        top-p:  the largest τ with Σ_{x_v ≥ τ} w_v ≥ p·Σ_v w_v,   w_v = e^{(x_v−M)/T},  over the tokens that top-k keeps

    τ is one of the row's own logits. It has no gradient, and the same bits on every rank.

    For top_k ≤ num_candidates, one all-gather collects the top_k largest logits of each rank, and τ is one of them. If
    top_p is below 1, one all-reduce also counts the tokens that top-k keeps. For top-p alone on a CPU, τ is sought
    among the row's num_candidates largest logits, after one pass that sums all masses. All other cases, and rows whose
    candidates have too little mass, use `find_largest_threshold`, which searches the bits of τ digit by digit.

    τ is −inf in rows that are not active, whatever their logits are. With top-p alone, τ is also −inf in rows with NaN
    or +inf, and in rows with only −inf.

    Args:
        logits: This rank's columns of the logits.
        sampling_filter: The filter.
        shard: This rank's shard of the vocabulary.
        temperature: T of each row, [N], or None for 1.
        active: The rows that need a threshold, [N].
        num_candidates: The number of a row's largest logits among which τ is sought first.

    Returns:
        τ, [N] in fp32 (fp64 for fp64 logits).

    Source: Fan, Lewis & Dauphin 2018 (arXiv:1805.04833) for top-k; Holtzman et al. 2020, "The Curious Case of Neural
    Text Degeneration" (arXiv:1904.09751) for top-p.
    """
    top_k, top_p = sampling_filter.top_k, sampling_filter.top_p
    if top_k is not None and top_k <= num_candidates:
        return _top_k_then_top_p(logits, top_k, top_p, shard, temperature, active)
    if top_k is None and top_p < 1 and logits.device.type == "cpu":
        return _top_p_of_candidates(logits, top_p, shard, temperature, active, num_candidates)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    thresholds = logits.new_full(active.shape, -torch.inf, dtype=dtype)
    if top_k is not None:
        count = torch.ones((), dtype=torch.int64, device=logits.device)
        thresholds = find_largest_threshold(
            logits,
            shard,
            active,
            weigh=lambda x, block: count.expand(x.shape),
            needed=lambda total: total.clamp(max=top_k),
        )
    if top_p < 1:
        thresholds = _top_p_thresholds(logits, top_p, shard, temperature, active, thresholds)
    return thresholds


def _gather_candidates(
    logits: Float[Tensor, "rows vocab_local"], count: int, shard: VocabShard, active: Bool[Tensor, " rows"]
) -> tuple[Float[Tensor, "rows kept"], Float[Tensor, " rows"]]:
    """Return the `count` largest logits of each row in descending order, in fp32 or fp64, and a bound.

    All logits above the bound are among the `count` largest of their own rank. Missing entries, and those of inactive
    rows, are −inf.
    """
    here = min(count, shard.num_columns)
    largest = logits.new_full((len(active), count), -torch.inf)
    if here:
        for block, skip in row_blocks(active, shard.num_columns):
            if not skip:
                largest[block, :here] = logits[block, : shard.num_columns].topk(here, dim=-1).values
    largest.masked_fill_(~active[:, None], -torch.inf)
    bound = largest[:, -1]
    if shard.is_parallel:
        parts = gather_from_ranks(largest, shard.group)
        bound = parts[:, :, -1].amax(dim=0)
        largest = parts.movedim(0, 1).flatten(1).topk(count, dim=-1).values
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return largest.to(dtype), bound.to(dtype)


def _top_k_then_top_p(
    logits: Float[Tensor, "rows vocab_local"],
    top_k: int,
    top_p: float,
    shard: VocabShard,
    temperature: Float[Tensor, " rows"] | None,
    active: Bool[Tensor, " rows"],
) -> Float[Tensor, " rows"]:
    """Return the thresholds of top-k or, if top_p < 1, of top-k and then top-p. The host does not wait for a GPU."""
    largest, _ = _gather_candidates(logits, top_k, shard, active)
    lowest = largest[:, -1].masked_fill(largest[:, -1].isnan(), -torch.inf)
    if top_p == 1:
        return lowest
    kept = torch.zeros(len(active), dtype=torch.int64, device=logits.device)
    if shard.num_columns:
        for block, skip in row_blocks(active, shard.num_columns):
            if not skip:
                kept[block] = (logits[block, : shard.num_columns] >= lowest[block, None]).sum(dim=1)
    if shard.is_parallel:
        dist.all_reduce(kept, group=shard.group)
    masses = _count_masses(largest, largest[:, 0], temperature)
    total = masses.sum(dim=1) + (kept - top_k).clamp(min=0) * masses[:, -1]  # plus the tokens that equal the last logit
    threshold, _ = _find_first_reaching(largest, masses, total, top_p)
    return torch.maximum(threshold, lowest)


def _top_p_of_candidates(
    logits: Float[Tensor, "rows vocab_local"],
    top_p: float,
    shard: VocabShard,
    temperature: Float[Tensor, " rows"] | None,
    active: Bool[Tensor, " rows"],
    num_candidates: int,
) -> Float[Tensor, " rows"]:
    """Return the thresholds of top-p: from the likeliest tokens if these have enough mass, otherwise by a search."""
    largest, bound = _gather_candidates(logits, num_candidates, shard, active)
    row_max = largest[:, 0]
    total = torch.zeros(len(active), dtype=torch.int64, device=logits.device)
    if shard.num_columns:
        for block, skip in row_blocks(active, shard.num_columns * _COPIES):
            if not skip:
                x = logits[block, : shard.num_columns].to(largest.dtype)
                block_temperature = None if temperature is None else temperature[block]
                total[block] = _count_masses(x, row_max[block], block_temperature).sum(dim=1)
    if shard.is_parallel:
        dist.all_reduce(total, group=shard.group)
    total = total.masked_fill(~active, 0)
    thresholds, reached = _find_first_reaching(largest, _count_masses(largest, row_max, temperature), total, top_p)
    flat = (total > 0) & ~(reached & (thresholds >= bound))
    if flat.any():  # a logit that is not a candidate might be above the threshold
        lowest = torch.full_like(thresholds, -torch.inf)
        searched = _top_p_thresholds(logits, top_p, shard, temperature, flat, lowest)
        thresholds = torch.where(flat, searched, thresholds)
    return thresholds


def _count_masses(
    x: Float[Tensor, "rows columns"], row_max: Float[Tensor, " rows"], temperature: Float[Tensor, " rows"] | None
) -> Int[Tensor, "rows columns"]:
    """Return the mass of each token in multiples of `_MASS_SCALE`, or 0 in rows whose maximum is not finite."""
    shifted = x - row_max[:, None]
    if temperature is not None:
        shifted /= temperature[:, None]
    return shifted.exp_().mul_(1 / _MASS_SCALE).nan_to_num_(nan=0.0).long()


def _required_mass(total: Int[Tensor, " rows"], top_p: float) -> Int[Tensor, " rows"]:
    """Return the mass that the kept tokens must reach."""
    return (total.double() * top_p).ceil().long().clamp(min=1)


def _find_first_reaching(
    largest: Float[Tensor, "rows kept"], masses: Int[Tensor, "rows kept"], total: Int[Tensor, " rows"], top_p: float
) -> tuple[Float[Tensor, " rows"], Bool[Tensor, " rows"]]:
    """Return the first of the sorted logits at which the cumulative mass reaches top_p·total, and whether one does.

    The logit is −inf in rows without mass.
    """
    short = masses.cumsum(dim=1) < _required_mass(total, top_p)[:, None]
    index = short.sum(dim=1).clamp(max=largest.size(1) - 1)
    logit = largest.gather(1, index[:, None])[:, 0]
    return logit.masked_fill((total == 0) | logit.isnan(), -torch.inf), ~short[:, -1]


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
        block_temperature = None if temperature is None else temperature[block]
        masses = _count_masses(x.to(lowest.dtype), row_max[block], block_temperature)
        return masses.masked_fill_(x < lowest[block, None], 0)

    thresholds = find_largest_threshold(logits, shard, active, weigh, needed=lambda total: _required_mass(total, top_p))
    return torch.maximum(thresholds, lowest)


def find_largest_threshold(
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
        histogram = _count_digits(logits, shard, active, weigh, first, shift)
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


def _count_digits(
    logits: Float[Tensor, "rows vocab_local"],
    shard: VocabShard,
    active: Bool[Tensor, " rows"],
    weigh: Callable[[Tensor, slice], Tensor],
    first: Int[Tensor, " rows"],
    shift: int,
) -> Int[Tensor, "rows digits"]:
    """Return this shard's weight of the logits with (ordered bits >> shift) = first + j, for each of 256 digits j."""
    # One extra position at each end collects the logits with smaller or larger prefixes.
    histogram = torch.zeros(len(active), _NUM_DIGITS + 2, dtype=torch.int64, device=logits.device)
    if shard.num_columns:
        for block, skip in row_blocks(active, shard.num_columns * _COPIES):
            if skip:
                continue
            x = logits[block, : shard.num_columns]
            position = (ordered_bits(x) >> shift).long().sub_(first[block, None] - 1).clamp_(0, _NUM_DIGITS + 1)
            histogram[block].scatter_add_(1, position, weigh(x, block))
    return histogram[:, 1:-1].contiguous()

"""Sums, extremes and order statistics of values that are spread over the data-parallel ranks.

A result covers the values of all ranks, and is the same on every rank, bit for bit. The amount of data that ranks
exchange does not grow with the number of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.topology.collectives import gather_from_ranks

_DIGITS = (11, 11, 10)  # how many bits each pass of a selection compares, from the highest bit on
_SIGN, _BITS = 1 << 31, (1 << 32) - 1


class Moments(NamedTuple):
    """The moments and extremes of values. Without values, the moments are 0, `least` is ∞ and `most` is −∞."""

    number: int
    mean: float
    deviation: float
    least: float
    most: float


@dataclass(frozen=True)
class RankReduction:
    """A reduction over the data-parallel ranks that hold parts of a batch. Every method is collective over them.

    Attributes:
        group: Their process group; None if this process holds the whole batch.
        device: The device of the collectives.
    """

    group: dist.ProcessGroup | None = None
    device: torch.device = torch.device("cpu")

    @property
    def is_alone(self) -> bool:
        """Return whether this rank holds the whole batch."""
        return self.group is None or self.group.size() == 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the element-wise sum of all ranks' values, added in rank order, on the host."""
        return self._gather(values).sum(0)

    def max(self, values: Tensor) -> Tensor:
        """Return the element-wise maximum of all ranks' values, on the host."""
        return self._gather(values).amax(0)

    def _gather(self, values: Tensor) -> Tensor:
        """Return all ranks' values, [ranks, …]; an all-reduce might add them in other orders on different tp ranks."""
        if self.is_alone:
            return values[None]
        return gather_from_ranks(values.to(self.device), self.group).cpu()

    def moments(self, values: Tensor, correction: int = 0) -> Moments:
        """Return the moments and the extremes of all ranks' values.

        Every rank sends its own moments once. They are combined as in Chan et al. 1979, "Updating formulae and a
        pairwise algorithm for computing sample variances".

        Args:
            values: [n] This rank's values.
            correction: The number to subtract from the count in the variance's denominator: 1 for the sample variance.
        """
        values = values.double()
        if not values.numel():
            local = values.new_tensor([0.0, 0.0, 0.0, torch.inf, -torch.inf])
        else:
            total = values.sum()
            squares = ((values - total / values.numel()) ** 2).sum()
            local = torch.stack([values.new_tensor(values.numel()), total, squares, values.min(), values.max()])
        numbers, totals, squares, least, most = self._gather(local).unbind(1)
        number = int(numbers.sum().item())
        if not number:
            return Moments(0, 0.0, 0.0, torch.inf, -torch.inf)
        mean = totals.sum() / number
        between = numbers * (totals / numbers.clamp(min=1) - mean) ** 2
        deviation = ((squares + between).sum() / max(number - correction, 1)).sqrt()
        return Moments(number, mean.item(), deviation.item(), least.min().item(), most.max().item())

    def order_statistics(self, values: Tensor, places: Sequence[int], weights: Tensor | None = None) -> list[float]:
        """Return the values at the indices `places` in the ascending order of all ranks' values.

        Several ranks select values digit by digit, as in a radix sort. Each pass selects the next digit of every place:
        it counts the next digits of the values that begin with the digits selected so far, and sums these counts over
        the ranks.

        Args:
            values: [n] This rank's values, fp32, without NaN.
            places: Indices in the ascending order, from 0.
            weights: [n] The number of times that each value counts, int64. None: once.
        """
        if self.is_alone and weights is None:
            return values.sort().values[list(places)].tolist()
        keys = _encode_keys(values)
        weights = torch.ones_like(keys) if weights is None else weights
        remaining = torch.tensor(places)  # the index of each place among the values that begin with its selected digits
        selected = torch.zeros(len(places), dtype=torch.int64)
        below = 32
        for digits in _DIGITS:
            below -= digits
            prefixes, prefix_indices = selected.unique(return_inverse=True)
            histograms = torch.zeros(len(prefixes), 1 << digits, dtype=torch.int64)
            for prefix, histogram in zip(prefixes, histograms, strict=True):
                is_candidate = keys >> (below + digits) == prefix
                bins = (keys[is_candidate] >> below) & ((1 << digits) - 1)
                histogram.index_add_(0, bins, weights[is_candidate])
            counts = self._sum_counts(histograms).cumsum(1)[prefix_indices]
            digit = (counts <= remaining[:, None]).sum(1)
            smaller = torch.where(digit > 0, counts.gather(1, (digit - 1).clamp(min=0)[:, None])[:, 0], 0)
            remaining, selected = remaining - smaller, (selected << digits) | digit
        return _decode_keys(selected).tolist()

    def _sum_counts(self, counts: Tensor) -> Tensor:
        """Return the sums of all ranks' counts. Integers have the same sum in any order."""
        if self.is_alone:
            return counts
        counts = counts.to(self.device)
        dist.all_reduce(counts, group=self.group)
        return counts.cpu()


ALONE = RankReduction()
"""The reduction over this process alone."""


def _encode_keys(values: Tensor) -> Tensor:
    """Return int64 numbers from 0 to 2³²−1 that sort in the same order as the fp32 values."""
    bits = (values.float() + 0.0).view(torch.int32).long() & _BITS  # adding 0 makes −0 the same as 0
    return torch.where(bits >= _SIGN, _BITS - bits, bits + _SIGN)


def _decode_keys(keys: Tensor) -> Tensor:
    """Return the fp32 values from which `_encode_keys` computed the keys."""
    bits = torch.where(keys >= _SIGN, keys - _SIGN, _BITS - keys)
    return torch.where(bits >= _SIGN, bits - (1 << 32), bits).int().view(torch.float32)

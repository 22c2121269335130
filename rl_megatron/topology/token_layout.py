"""Scatter the tokens of a batch, padded or packed, over the CP ranks as a model needs them, and gather them again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.topology.collectives import gather_from_ranks
from rl_megatron.topology.degrees import zigzag_slices


@dataclass(frozen=True)
class TokenLayout:
    """The map between a `[B, S]` batch and the model's `[R, L]` tokens on each context-parallel rank, as one index.

        index[b, t] = rank · R·L + position among that rank's R·L tokens, or −1 if the model does not get the token

    `scatter` moves values from the batch's order to the model's, and `gather` moves them back. No other code needs to
    know whether sequences are padded (R = B) or packed (R = 1), or over how many ranks they are cut. A sequence is cut
    zigzag into 2·cp equal slices; rank r holds the slices r and 2·cp−1−r.

    Sequences with a common beginning may share the model's tokens. Then `scatter` takes the largest of their values,
    and the gradient of `gather` is the sum of theirs.

    Attributes:
        index: `[B, S]`, as above.
        local_shape: (R, L) on each context-parallel rank.
        cp_group: The context-parallel ranks; None for one rank.
        is_shared: Whether sequences share tokens.
    """

    index: Tensor
    local_shape: tuple[int, int]
    cp_group: dist.ProcessGroup | None
    is_shared: bool = False

    @classmethod
    def from_padded_batch(
        cls, batch: tuple[int, int], local_length: int, cp_group: dist.ProcessGroup | None, device: torch.device
    ) -> TokenLayout:
        """Return the layout of sequences that are each padded to local_length · cp positions."""
        num_sequences, width = batch
        starts = torch.arange(num_sequences + 1, device=device) * (local_length * _size(cp_group))
        lengths = torch.full((num_sequences,), width, device=device)
        index = zigzag_index(lengths, starts[:-1], starts.diff(), width, num_sequences * local_length, _size(cp_group))
        return cls(index, (num_sequences, local_length), cp_group)

    @classmethod
    def from_pack(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor,
        width: int,
        local_length: int,
        cp_group: dist.ProcessGroup | None,
    ) -> TokenLayout:
        """Return the layout of sequences that are packed one after the other.

        Sequence b has `cu_seqlens[b+1] − cu_seqlens[b]` tokens, which begin at `cu_seqlens_padded[b]` of the pack.
        Every rank holds its zigzag part of each sequence.

        Args:
            cu_seqlens: `[B+1]` cumulative lengths, in tokens over all ranks.
            cu_seqlens_padded: `[B+1]` cumulative padded lengths, in tokens over all ranks.
            width: S of the batch.
            local_length: L, the tokens on each rank.
            cp_group: The context-parallel ranks; None for one rank.
        """
        index = zigzag_index(
            cu_seqlens.diff(), cu_seqlens_padded[:-1], cu_seqlens_padded.diff(), width, local_length, _size(cp_group)
        )
        return cls(index, (1, local_length), cp_group)

    @classmethod
    def from_segments(
        cls,
        segments: Sequence[tuple[int, int]],
        paths: Sequence[Sequence[int]],
        padded_lengths: Sequence[int],
        width: int,
        cp_group: dist.ProcessGroup | None,
    ) -> TokenLayout:
        """Return the layout of sequences that consist of segments, which are packed one after the other.

        Args:
            segments: The position of each segment's first token in its sequences, and its number of tokens.
            paths: For each sequence, the indices of its segments.
            padded_lengths: The padded length of each segment, in tokens over all ranks.
            width: S of the batch.
            cp_group: The context-parallel ranks; None for one rank.
        """
        lengths, padded = torch.tensor([length for _, length in segments]), torch.tensor(padded_lengths)
        num_local = sum(padded_lengths) // _size(cp_group)
        located = zigzag_index(
            lengths, padded.cumsum(0) - padded, padded, max(padded_lengths), num_local, _size(cp_group)
        )
        index = torch.full((len(paths), width), -1)
        for sequence, path in enumerate(paths):
            for number in path:
                begin, length = segments[number]
                index[sequence, begin : begin + length] = located[number, :length]
        return cls(index, (1, num_local), cp_group, is_shared=True)

    def scatter(self, x: Tensor, fill: float) -> Tensor:
        """Return this rank's part [R, L, …] of `x` [B, S, …], with `fill` at positions without a token. No gradient."""
        num_local, rank = math.prod(self.local_shape), 0 if self.cp_group is None else self.cp_group.rank()
        positions = self.index.flatten() - rank * num_local
        elsewhere = (positions < 0) | (positions >= num_local)
        local = x.new_full((num_local + 1, *x.shape[2:]), fill)  # the last entry collects the tokens of other ranks
        positions = positions.masked_fill(elsewhere, num_local)
        if self.is_shared:
            _keep_largest(local, positions, x.flatten(0, 1))
        else:
            local[positions] = x.flatten(0, 1)
        return local[:num_local].view(*self.local_shape, *x.shape[2:])

    def separate(self, chosen: Tensor, most: int | None = None) -> TokenLayout:
        """Return the layout of `most` places for each of the model's tokens, one for each sequence that shares it.

        Sequences where `chosen` [B, S] is false get no place. `most` is at least the number of chosen sequences that
        share a token; None: it is computed, and the host waits for the device.
        """
        index = self.index.masked_fill(~chosen, -1)
        ordered, order = index.sort(dim=0, stable=True)  # sequences share tokens of the same position only
        numbers = torch.arange(len(index), device=index.device)[:, None].expand_as(index)
        begins = torch.nn.functional.pad(ordered[1:] != ordered[:-1], (0, 0, 1, 0), value=True)
        places = torch.empty_like(index).scatter_(0, order, numbers - numbers.where(begins, 0).cummax(dim=0).values)
        if most is None:
            most = int(places.masked_fill(index < 0, 0).max()) + 1
        local_shape = self.local_shape[0], self.local_shape[1] * most
        return TokenLayout(torch.where(index < 0, -1, index * most + places), local_shape, self.cp_group)

    def count(self, chosen: Tensor) -> Tensor:
        """Return, for each of this rank's tokens [R, L], in how many sequences `chosen` [B, S] is true for it, fp32."""
        num_local, rank = math.prod(self.local_shape), 0 if self.cp_group is None else self.cp_group.rank()
        positions = self.index[chosen & (self.index // num_local == rank) & (self.index >= 0)] - rank * num_local
        return torch.bincount(positions, minlength=num_local).float().view(self.local_shape)

    def gather(self, x: Tensor) -> Tensor:
        """Gather every rank's [R, L, …] into the whole [B, S, …], with 0 for tokens that the model does not get.

        Every rank then computes the *same* loss from the result, so each already has the full gradient of its own
        tokens. Backward returns it without a collective, because a sum over the ranks would multiply it by cp.
        """
        everywhere = _GatherLocal.apply(x.flatten(0, 1), self.cp_group) if _size(self.cp_group) > 1 else x.flatten(0, 1)
        picked = everywhere[self.index.clamp(min=0)]
        absent = (self.index < 0).view(*self.index.shape, *(1 for _ in x.shape[2:]))
        return picked.masked_fill(absent, 0.0)

    def locate_next_tokens(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return values, without a gradient, and for each token the index of its next token in them.

        Args:
            x: [R, L, …] of this rank.

        Returns:
            (values, index). `index` [R, L] points into `values`, flattened to [*, …]; it is −1 if there is no token or
            no next token. On one context-parallel rank, `values` is `x` itself. Otherwise it is a copy of `x`, followed
            by the values of the token after each cut.
        """
        following = torch.nn.functional.pad(self.index[:, 1:], (0, 1), value=-1)
        if self.cp_group is None or self.cp_group.size() == 1:
            return x.detach(), self.scatter(following, -1)
        num_local, rank, num_cuts = math.prod(self.local_shape), self.cp_group.rank(), 2 * (self.cp_group.size() - 1)
        is_cut = (following >= 0) & (following // num_local != self.index // num_local)
        cut = torch.arange(len(is_cut), device=x.device)[:, None] * num_cuts + is_cut.cumsum(dim=1) - 1
        # The last entry collects the tokens that are not at a cut.
        wanted = following.new_full((len(is_cut) * num_cuts + 1,), -1)
        wanted[torch.where(is_cut, cut, len(wanted) - 1)] = following.masked_fill(~is_cut, -1)
        positions = wanted[:-1] - rank * num_local
        is_local = ((positions >= 0) & (positions < num_local)).view(-1, *(1 for _ in x.shape[2:]))
        flat = x.detach().flatten(0, 1)
        borrowed = torch.where(is_local, flat[positions.clamp(0, num_local - 1)], 0)
        dist.all_reduce(borrowed, group=self.cp_group)  # exactly one rank owns each value
        index = torch.where(is_cut, num_local + cut, following - rank * num_local)
        return torch.cat([flat, borrowed]), self.scatter(index.masked_fill(following < 0, -1), -1)


def _keep_largest(target: Tensor, positions: Tensor, x: Tensor) -> None:
    """Set the entries of `target` [n, …] at `positions` to the largest values that `x` [k, …] has for them."""
    index = positions.view(-1, *(1 for _ in x.shape[1:])).expand_as(x)
    if x.dtype is torch.bool:  # torch has no maximum of bools
        target, x = target.view(torch.uint8), x.to(torch.uint8)
    target.scatter_reduce_(0, index, x, "amax", include_self=False)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def zigzag_index(
    lengths: Tensor, starts: Tensor, padded_lengths: Tensor, width: int, num_local: int, cp_size: int
) -> Tensor:
    """Return `TokenLayout.index` `[B, width]` of sequences in a pack that all ranks share.

    Args:
        lengths: `[B]` The length of each sequence.
        starts: `[B]` The start of each sequence in the pack, in tokens over all ranks.
        padded_lengths: `[B]` The number of tokens that each sequence occupies in the pack, padding included.
        width: S of the batch.
        num_local: The number of the pack's tokens on each rank.
        cp_size: The number of context-parallel ranks.
    """
    position = torch.arange(width, device=lengths.device)
    slice_length = (padded_lengths // zigzag_slices(cp_size)).clamp(min=1)[:, None]
    cp_slice, within = position // slice_length, position % slice_length
    # A single rank has one slice, as long as the sequence: slice 0 of rank 0.
    rank = torch.minimum(cp_slice, 2 * cp_size - 1 - cp_slice)
    second_half = (cp_slice >= cp_size) * slice_length
    local = starts[:, None] // cp_size + within + second_half
    return torch.where(position < lengths[:, None], rank * num_local + local, -1)


class _GatherLocal(torch.autograd.Function):
    """Gather [N, …] of each rank into [cp·N, …] in rank order; backward returns this rank's part."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.num_local = group.rank(), x.size(0)
        return gather_from_ranks(x, group).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return gradient.narrow(0, ctx.rank * ctx.num_local, ctx.num_local), None

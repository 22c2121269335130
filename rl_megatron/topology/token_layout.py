"""Where each token of a batch lies in the rows that a model runs on: padded or packed, whole or cut over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.topology.context_parallel import zigzag_slices


@dataclass(frozen=True)
class TokenLayout:
    """A `[B, S]` batch and the model's rows `[R, L]` on each context-parallel rank, as one index:

        place[b, t] = rank · R·L + position among that rank's R·L tokens, −1 where the token is in no row

    Everything aligned with the batch goes to the model's rows by `scatter` and comes back by `gather`; what lies
    between (one model row per batch row, or all rows packed into one; one rank or several) concerns nobody else.
    A sequence of P positions is cut zigzag: 2·cp equal chunks, rank r holding chunks r and 2·cp−1−r.
    """

    place: Tensor
    local_shape: tuple[int, int]
    cp_group: dist.ProcessGroup | None

    @classmethod
    def padded(
        cls, batch: tuple[int, int], local_length: int, cp_group: dist.ProcessGroup | None, device: torch.device
    ) -> TokenLayout:
        """Each sequence in a row of its own, padded to local_length · cp positions."""
        num_sequences, width = batch
        starts = torch.arange(num_sequences + 1, device=device) * (local_length * _size(cp_group))
        lengths = torch.full((num_sequences,), width, device=device)
        place = zigzag_places(lengths, starts[:-1], starts.diff(), width, num_sequences * local_length, _size(cp_group))
        return cls(place, (num_sequences, local_length), cp_group)

    @classmethod
    def packed(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor,
        width: int,
        local_length: int,
        cp_group: dist.ProcessGroup | None,
    ) -> TokenLayout:
        """All sequences one after the other in one row: sequence b has its `cu_seqlens[b+1] − cu_seqlens[b]` tokens at
        `cu_seqlens_padded[b]` of the whole row, and every rank its zigzag part of each sequence.

        Shapes: cu_seqlens, cu_seqlens_padded [B+1], in tokens over all ranks; width S of the batch.
        """
        place = zigzag_places(
            cu_seqlens.diff(), cu_seqlens_padded[:-1], cu_seqlens_padded.diff(), width, local_length, _size(cp_group)
        )
        return cls(place, (1, local_length), cp_group)

    def scatter(self, x: Tensor, fill: float) -> Tensor:
        """[B, S, …] → this rank's [R, L, …], `fill` where no token lies. Takes part in no gradient."""
        num_local, rank = math.prod(self.local_shape), 0 if self.cp_group is None else self.cp_group.rank()
        mine = self.place.flatten() - rank * num_local
        nowhere = (mine < 0) | (mine >= num_local)
        local = x.new_full((num_local + 1, *x.shape[2:]), fill)  # the last entry takes what is not here
        local[mine.masked_fill(nowhere, num_local)] = x.flatten(0, 1)
        return local[:num_local].view(*self.local_shape, *x.shape[2:])

    def gather(self, x: Tensor) -> Tensor:
        """Every rank's [R, L, …] → the whole [B, S, …], 0 where a token is in no row, from which every rank then
        computes the *same* loss: backward hands each rank its own part of the gradient, with no collective. Summing
        the ranks' equal gradients would count each token cp times."""
        everywhere = _AllRanks.apply(x.flatten(0, 1), self.cp_group) if _size(self.cp_group) > 1 else x.flatten(0, 1)
        picked = everywhere[self.place.clamp(min=0)]
        absent = (self.place < 0).view(*self.place.shape, *(1 for _ in x.shape[2:]))
        return picked.masked_fill(absent, 0.0)

    def following(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Where each token finds the row of the token after it: (rows, index), index [R, L] counting the rows of `rows`
        [*, …] in order, −1 where no token lies or none follows. `rows` is x [R, L, …] itself, with no copy; only where
        a sequence is cut over ranks it is a copy with the rows at the cuts appended. Takes part in no gradient.
        """
        following = torch.nn.functional.pad(self.place[:, 1:], (0, 1), value=-1)
        if self.cp_group is None or self.cp_group.size() == 1:
            return x.detach(), self.scatter(following, -1)
        num_local, rank, num_cuts = math.prod(self.local_shape), self.cp_group.rank(), 2 * (self.cp_group.size() - 1)
        is_cut = (following >= 0) & (following // num_local != self.place // num_local)
        cut = torch.arange(len(is_cut), device=x.device)[:, None] * num_cuts + is_cut.cumsum(dim=1) - 1
        wanted = following.new_full((len(is_cut) * num_cuts + 1,), -1)  # the last entry takes what is no cut
        wanted[torch.where(is_cut, cut, len(wanted) - 1)] = following.masked_fill(~is_cut, -1)
        mine = wanted[:-1] - rank * num_local
        owned = ((mine >= 0) & (mine < num_local)).view(-1, *(1 for _ in x.shape[2:]))
        flat = x.detach().flatten(0, 1)
        borrowed = torch.where(owned, flat[mine.clamp(0, num_local - 1)], 0)
        dist.all_reduce(borrowed, group=self.cp_group)  # each row has one owner
        index = torch.where(is_cut, num_local + cut, following - rank * num_local)
        return torch.cat([flat, borrowed]), self.scatter(index.masked_fill(following < 0, -1), -1)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def zigzag_places(
    lengths: Tensor, starts: Tensor, padded_lengths: Tensor, width: int, num_local: int, cp_size: int
) -> Tensor:
    """Return `place` `[B, width]` (see `TokenLayout`) of sequences in a row that all ranks share.

    Args:
        lengths: `[B]` tokens of each sequence.
        starts: `[B]` where each sequence begins in the row, over all ranks.
        padded_lengths: `[B]` tokens that each sequence occupies in the row, padding included.
        width: S of the batch.
        num_local: Tokens of the row on each rank.
        cp_size: The number of context-parallel ranks.
    """
    position = torch.arange(width, device=lengths.device)
    slice_length = (padded_lengths // zigzag_slices(cp_size)).clamp(min=1)[:, None]
    cp_slice, within = position // slice_length, position % slice_length
    # One rank has one chunk as long as the sequence: chunk 0 of rank 0.
    rank = torch.minimum(cp_slice, 2 * cp_size - 1 - cp_slice)
    second_half = (cp_slice >= cp_size) * slice_length
    local = starts[:, None] // cp_size + within + second_half
    return torch.where(position < lengths[:, None], rank * num_local + local, -1)


class _AllRanks(torch.autograd.Function):
    """[N, …] of each rank → [cp·N, …] in rank order; backward is this rank's part."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.num_local = group.rank(), x.size(0)
        parts = x.new_empty(group.size(), *x.shape)
        dist.all_gather(list(parts.unbind(0)), x.contiguous(), group=group)
        return parts.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor):
        return gradient.narrow(0, ctx.rank * ctx.num_local, ctx.num_local), None

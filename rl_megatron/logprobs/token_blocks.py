"""Which rows of hidden states are worked on together, how they come together, and how their gradients part again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

# torch 2.13 renamed both.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class BlockPlan:
    """The rows that count, in chunks.

    order [n]: the row that stands at each place, −1 where none does; None: all rows in their own order. Over `shards`
    sequence-parallel ranks a chunk has equally many places for each rank's rows, rank after rank.
    """

    order: Int[Tensor, " places"] | None
    blocks: tuple[slice, ...]
    shards: int
    local_rows: int

    @classmethod
    def of(cls, counts: Bool[Tensor, " rows"], shards: int, block_tokens: int) -> BlockPlan:
        """Return the plan for those of N rows that count, if each of `shards` ranks has N/shards of them in a row.
        Chunks are equally long, at most `block_tokens` if that is not less than `shards`."""
        local_rows = len(counts) // shards
        per_rank = counts.view(shards, local_rows).sum(dim=1)
        longest = int(per_rank.max()) if len(counts) else 0  # on a GPU this waits, once
        num_blocks = -(-longest * shards // max(shards, block_tokens))
        length = -(-longest // max(1, num_blocks))
        edges = [min(length * i, longest) for i in range(num_blocks + 1)]
        blocks = tuple(slice(shards * a, shards * b) for a, b in zip(edges, edges[1:], strict=False))
        if shards == 1 and longest == len(counts):
            return cls(None, blocks, 1, local_rows)
        # Rows that count first, in their order, on each rank; then −1.
        ranked = torch.argsort(~counts.view(shards, local_rows), dim=1, stable=True)[:, :longest]
        missing = torch.arange(longest, device=counts.device) >= per_rank[:, None]
        rows = ranked + local_rows * torch.arange(shards, device=counts.device)[:, None]
        rows = rows.masked_fill(missing, -1)
        order = torch.cat([rows[:, a:b].flatten() for a, b in zip(edges, edges[1:], strict=False)] or [rows.flatten()])
        return cls(order, blocks, shards, local_rows)

    @property
    def longest(self) -> int:
        """Rows of the longest chunk."""
        return max((block.stop - block.start for block in self.blocks), default=0)

    def select(self, x: Shaped[Tensor, " rows *rest"], fill: float) -> Shaped[Tensor, " places *rest"]:
        """Return the rows in the plan's order, `fill` at places that no row stands at."""
        if self.order is None:
            return x
        picked = x[self.order.clamp(min=0)]
        return picked.masked_fill((self.order < 0).view(-1, *(1 for _ in x.shape[1:])), fill)

    def restore(self, x: Shaped[Tensor, " places *rest"], num_rows: int) -> Shaped[Tensor, " {num_rows} *rest"]:
        """Return the rows in their own order, given them in the plan's: 0 if they do not count. Differentiable."""
        if self.order is None:
            return x
        places = torch.where(self.order < 0, num_rows, self.order)  # the last entry takes what stands for no row
        return x.new_zeros(num_rows + 1, *x.shape[1:]).index_copy(0, places, x)[:num_rows]

    def local(self, block: slice, rank: int) -> Int[Tensor, " places"] | slice:
        """Return which of the rank's own rows stand in the chunk, −1 at places of none; a slice if all do."""
        if self.order is None:
            return block
        length = (block.stop - block.start) // self.shards
        rows = self.order[block.start + rank * length : block.start + (rank + 1) * length]
        return torch.where(rows < 0, -1, rows - rank * self.local_rows)


@dataclass(frozen=True)
class HiddenBlocks:
    """A plan's chunks of hidden states [N, H], which with `group` are cut over its ranks: [N/tp, H] on each."""

    plan: BlockPlan
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def of(
        self, hidden: Float[Tensor, "rows_local hidden"], reverse: bool = False
    ) -> Iterator[tuple[slice, Float[Tensor, "places hidden"]]]:
        """Yield (rows of the plan, their hidden states [n, H]) for each chunk. The next one is gathered meanwhile."""
        blocks = self.plan.blocks[::-1] if reverse else self.plan.blocks
        coming = [self._start(hidden, block) for block in blocks[:1]]
        for index, block in enumerate(blocks):
            states, handle, _ = coming.pop()
            if handle is not None:
                handle.wait()
            if index + 1 < len(blocks):
                coming.append(self._start(hidden, blocks[index + 1]))
            yield block, states

    def _start(
        self, hidden: Float[Tensor, "rows_local hidden"], block: slice
    ) -> tuple[Float[Tensor, "places hidden"], dist.Work | None, Float[Tensor, "... hidden"]]:
        """Return the chunk's states, the work that they wait for, and what must live until then."""
        rows = self.plan.local(block, self.rank)
        if isinstance(rows, slice):
            return hidden[rows], None, hidden
        mine = hidden.index_select(0, rows.clamp(min=0))
        if self.group is None:
            return mine, None, mine
        mine.masked_fill_((rows < 0)[:, None], 0.0)  # a row that is left out may hold anything, and 0 · NaN is NaN
        states = hidden.new_empty(block.stop - block.start, hidden.shape[1])
        return states, _gather(states, mine, group=self.group, async_op=True), mine

    def gradient(
        self, hidden: Float[Tensor, "rows_local hidden"], tp_group: dist.ProcessGroup | None
    ) -> HiddenGradient:
        return HiddenGradient(self, hidden, tp_group)


class HiddenGradient:
    """dL/dhidden [N, H], from what each chunk's rows say on each rank of `tp_group` (None: on this one alone)."""

    def __init__(
        self,
        blocks: HiddenBlocks,
        hidden: Float[Tensor, "rows_local hidden"],
        tp_group: dist.ProcessGroup | None,
    ):
        self._plan, self._blocks, self._tp_group = blocks.plan, blocks, tp_group
        self._pending: tuple[dist.Work | None, Tensor, Tensor | slice, Tensor] | None = None
        num_rows = hidden.shape[0]
        if self._plan.order is None:
            self._whole = torch.empty_like(hidden)
        else:
            self._whole = hidden.new_zeros(num_rows + 1, hidden.shape[1])  # the last row takes what stands for no row
        self._sum = self._whole[:num_rows]

    def add(
        self, block: slice, dz: Float[Tensor, "places vocab_local"], weight: Float[Tensor, "vocab_local hidden"]
    ) -> None:
        """Start the sum over ranks of dz·W [n, H]; the one before is finished first."""
        self._settle()
        rows = self._plan.local(block, self._blocks.rank)
        if isinstance(rows, slice):
            part = torch.mm(dz, weight, out=self._sum[rows])
        else:
            part = torch.mm(dz, weight)
        if self._blocks.group is not None:
            mine = part.new_empty(len(part) // self._plan.shards, part.shape[1])
            handle = _reduce_scatter(mine, part, group=self._blocks.group, async_op=True)
        else:
            mine = part
            handle = None if self._tp_group is None else dist.all_reduce(mine, group=self._tp_group, async_op=True)
        self._pending = (handle, mine, rows, part)  # what is under way must not be freed

    def finish(self) -> Float[Tensor, "rows_local hidden"]:
        self._settle()
        return self._sum

    def _settle(self) -> None:
        if self._pending is None:
            return
        handle, mine, rows, _ = self._pending
        self._pending = None
        if handle is not None:
            handle.wait()
        if not isinstance(rows, slice):
            self._whole.index_copy_(0, torch.where(rows < 0, len(self._whole) - 1, rows), mine)

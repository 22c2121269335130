"""Token blocks: which rows of hidden states are processed together, and how ranks exchange them and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rl_megatron.logprobs.vocab_parallel import check
from rl_megatron.topology.collectives import all_gather, reduce_scatter


@dataclass(frozen=True)
class BlockPlan:
    """The assignment of rows that count to token blocks. A row counts if its target is not ignored.

    The plan has n places, each with one row or none. Over `shards` sequence-parallel ranks, a block has the same number
    of places for each rank's rows, in rank order.

    Attributes:
        order: The row at each place, [n], or −1 for none. None: all rows in their own order.
        blocks: The places of each token block.
        shards: The number of sequence-parallel ranks.
        local_rows: The number of rows of each rank.
    """

    order: Int[Tensor, " places"] | None
    blocks: tuple[slice, ...]
    shards: int
    local_rows: int

    @classmethod
    def from_counts(
        cls, counts: Bool[Tensor, " rows"], shards: int, block_tokens: int, most_counted: int | None = None
    ) -> BlockPlan:
        """Return the plan for the rows that count.

        Blocks have equal lengths, except that the last may be shorter.

        Args:
            counts: Which of the N rows count. Each rank has N/shards consecutive rows.
            shards: The number of sequence-parallel ranks.
            block_tokens: The largest number of places of a block; it is rounded up to a multiple of `shards`.
            most_counted: The largest number of rows that count on any rank. None: it is computed, and the host waits
                for the device.

        Raises:
            ValueError: More rows count on a rank than `most_counted` (on a GPU, see `check`).
        """
        local_rows = len(counts) // shards
        per_rank = counts.view(shards, local_rows).sum(dim=1)
        if most_counted is None:
            longest = int(per_rank.max()) if len(counts) else 0
        else:
            longest = most_counted
            check(
                (per_rank <= longest).all(),
                lambda: f"most_counted={longest} is too small: {per_rank.tolist()} rows count on the ranks",
            )
        num_blocks = -(-longest * shards // max(shards, block_tokens))
        length = -(-longest // max(1, num_blocks))
        edges = [min(length * i, longest) for i in range(num_blocks + 1)]
        blocks = tuple(slice(shards * a, shards * b) for a, b in zip(edges, edges[1:], strict=False))
        if shards == 1 and longest == len(counts):
            return cls(None, blocks, 1, local_rows)
        # On each rank the rows that count come first, in their own order, and −1 follows.
        ranked = torch.argsort(~counts.view(shards, local_rows), dim=1, stable=True)[:, :longest]
        missing = torch.arange(longest, device=counts.device) >= per_rank[:, None]
        rows = ranked + local_rows * torch.arange(shards, device=counts.device)[:, None]
        rows = rows.masked_fill(missing, -1)
        order = torch.cat([rows[:, a:b].flatten() for a, b in zip(edges, edges[1:], strict=False)] or [rows.flatten()])
        return cls(order, blocks, shards, local_rows)

    @property
    def longest(self) -> int:
        """Return the number of places of the longest block."""
        return max((block.stop - block.start for block in self.blocks), default=0)

    def select(self, x: Shaped[Tensor, " rows *rest"], fill: float) -> Shaped[Tensor, " places *rest"]:
        """Return the rows in the plan's order, with `fill` at places without a row."""
        if self.order is None:
            return x
        picked = x[self.order.clamp(min=0)]
        return picked.masked_fill((self.order < 0).view(-1, *(1 for _ in x.shape[1:])), fill)

    def restore(self, x: Shaped[Tensor, " places *rest"], num_rows: int) -> Shaped[Tensor, " {num_rows} *rest"]:
        """Return rows that are in the plan's order in their original order, with 0 for rows that do not count.

        The operation is differentiable.
        """
        if self.order is None:
            return x
        places = torch.where(self.order < 0, num_rows, self.order)  # places without a row write to an extra last row
        return x.new_zeros(num_rows + 1, *x.shape[1:]).index_copy(0, places, x)[:num_rows]

    def local(self, block: slice, rank: int) -> Int[Tensor, " places"] | slice:
        """Return the rank's own row at each of its places in the block (−1: none); a slice if `order` is None."""
        if self.order is None:
            return block
        length = (block.stop - block.start) // self.shards
        rows = self.order[block.start + rank * length : block.start + (rank + 1) * length]
        return torch.where(rows < 0, -1, rows - rank * self.local_rows)


@dataclass(frozen=True)
class HiddenBlocks:
    """The token blocks of hidden states [N, H]; each rank of `group` holds [N/tp, H].

    Attributes:
        plan: The rows of each block.
        group: The sequence-parallel group, or None if every rank has all hidden states.
    """

    plan: BlockPlan
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """Return this process's rank in the group, or 0 without a group."""
        return 0 if self.group is None else self.group.rank()

    def iterate(
        self, hidden: Float[Tensor, "rows_local hidden"], reverse: bool = False
    ) -> Iterator[tuple[slice, Float[Tensor, "places hidden"]]]:
        """Yield (places, hidden states [n, H]) of each block, while the next block is being gathered.

        Args:
            hidden: This rank's hidden states.
            reverse: Whether to start with the last block.
        """
        blocks = self.plan.blocks[::-1] if reverse else self.plan.blocks
        started = [self._start(hidden, block) for block in blocks[:1]]
        for index, block in enumerate(blocks):
            states, handle, _ = started.pop()
            if handle is not None:
                handle.wait()
            if index + 1 < len(blocks):
                started.append(self._start(hidden, blocks[index + 1]))
            yield block, states

    def _start(
        self, hidden: Float[Tensor, "rows_local hidden"], block: slice
    ) -> tuple[Float[Tensor, "places hidden"], dist.Work | None, Float[Tensor, "... hidden"]]:
        """Return (the block's states, the collective that fills them or None, a tensor to keep alive until it ends)."""
        rows = self.plan.local(block, self.rank)
        if isinstance(rows, slice):
            return hidden[rows], None, hidden
        local_states = hidden.index_select(0, rows.clamp(min=0))
        if self.group is None:
            return local_states, None, local_states
        local_states.masked_fill_((rows < 0)[:, None], 0.0)  # a row that is left out may be NaN, and 0 · NaN is NaN
        states = hidden.new_empty(block.stop - block.start, hidden.shape[1])
        return states, all_gather(states, local_states, group=self.group, async_op=True), local_states


class HiddenGradient:
    """The gradient dL/dhidden [N, H], summed block by block over the ranks of `tp_group` (None: on this rank alone)."""

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
            self._whole = hidden.new_zeros(num_rows + 1, hidden.shape[1])  # places without a row write to the extra row
        self._sum = self._whole[:num_rows]

    def add(
        self, block: slice, dz: Float[Tensor, "places vocab_local"], weight: Float[Tensor, "vocab_local hidden"]
    ) -> None:
        """Start the sum over ranks of a block's dz·W, [n, H], after the previous block's sum is complete."""
        self._settle()
        rows = self._plan.local(block, self._blocks.rank)
        if isinstance(rows, slice):
            part = torch.mm(dz, weight, out=self._sum[rows])
        else:
            part = torch.mm(dz, weight)
        if self._blocks.group is not None:
            local_sum = part.new_empty(len(part) // self._plan.shards, part.shape[1])
            handle = reduce_scatter(local_sum, part, group=self._blocks.group, async_op=True)
        else:
            local_sum = part
            handle = None if self._tp_group is None else dist.all_reduce(local_sum, group=self._tp_group, async_op=True)
        self._pending = (handle, local_sum, rows, part)  # keeps the collective's input alive until it is done

    def finish(self) -> Float[Tensor, "rows_local hidden"]:
        """Wait for the last block's sum, and return the gradient of this rank's hidden states."""
        self._settle()
        return self._sum

    def _settle(self) -> None:
        """Wait for the pending sum, if any, and write it into the gradient."""
        if self._pending is None:
            return
        handle, local_sum, rows, _ = self._pending
        self._pending = None
        if handle is not None:
            handle.wait()
        if not isinstance(rows, slice):
            self._whole.index_copy_(0, torch.where(rows < 0, len(self._whole) - 1, rows), local_sum)

"""Bring the values of tokens from the ranks that computed them to the host of every rank.

A device only ever has the values of its own rank's sequences and a block of bounded size, however many ranks there are.
The block is smaller than what the forward pass has held, so that gathering does not raise the peak of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.batching.ownership import PADDING
from rl_megatron.batching.rank_plan import GlobalPlan
from rl_megatron.batching.sharded import ShardedBatch
from rl_megatron.topology.collectives import from_all_ranks
from rl_megatron.topology.topology import Topology
from rl_megatron.topology.transfer import send, to_host

BLOCK_BYTES = 1 << 25
"""The size on a device of the values that one collective gathers from all ranks, at most."""


@dataclass(frozen=True)
class TokenValues:
    """Which values of a planned batch are computed where. A value is […], one number or several.

    Attributes:
        planned: The microbatches of all data-parallel ranks.
        lengths: The tokens of each sequence of the batch, without padding sequences.
        first_column: The first token of a sequence that has a value. The values of microbatches begin there too.
        topology: The layout.
        hidden_bytes: The bytes of the hidden state of one token.
    """

    planned: GlobalPlan
    lengths: Sequence[int]
    first_column: int
    topology: Topology
    hidden_bytes: int

    def on_every_host(self, streams: Sequence[Tensor], entry: Tensor) -> Tensor:
        """Return the value of every token [B, S, …] on the host of every rank. Collective.

        Args:
            streams: [b, ·, …] of each of this rank's microbatches on the last pipeline stage, and none on other stages.
            entry: […] Zeros of the shape and dtype of one value. They fill entries without a value: those before
                `first_column` and those beyond a sequence's end.
        """
        topology, width = self.topology, self.planned.batch["input_ids"].size(1)
        counts = [sum(map(self._count, chain.from_iterable(shard))) for shard in self.planned.plan.sequences]
        mine = torch.zeros(max(counts), *entry.shape, dtype=entry.dtype, device=topology.device)
        if topology.is_last_stage:
            mine[: counts[topology.data_rank]] = self._flattened(streams)
        if topology.pipeline > 1:
            dist.broadcast(mine, src=topology.last_stage_rank, group=topology.groups.pp)
        whole = torch.zeros(self.planned.num_sequences * width, *entry.shape, dtype=entry.dtype)
        for shard, values in enumerate(self._of_all_ranks(mine)):
            sequences = list(chain.from_iterable(self.planned.plan.sequences[shard]))
            whole[self._places(sequences, sequences, width, self.first_column)] = values[: counts[shard]]
        return whole.unflatten(0, (-1, width))

    def _count(self, sequence: int) -> int:
        """Return how many values a sequence has: a padding sequence has none."""
        return max(self.lengths[sequence] - self.first_column, 0) if sequence < len(self.lengths) else 0

    def _flattened(self, streams: Sequence[Tensor]) -> Tensor:
        """Return the values of this rank's tokens, [n, …], in the order of microbatches and sequences."""
        chosen = self.planned.plan.sequences[self.topology.data_rank]
        return _flattened(streams, [list(map(self._count, sequences)) for sequences in chosen], self.topology.device)

    def _places(self, sequences: Sequence[int], indices: Sequence[int], width: int, column: int) -> Tensor:
        return _places([self._count(sequence) for sequence in sequences], indices, width, column)

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        """Return the values [ranks, n, …] of all data-parallel ranks on the host, from this rank's [n, …].

        A block may begin within a value, because one of every rank may already be too many bytes.
        """
        group, flat = self.topology.groups.dp, mine.flatten()
        step = max(1, self._block_bytes() // (group.size() * flat.element_size()))
        found = torch.empty(group.size(), len(flat), dtype=flat.dtype)
        for start in range(0, len(flat), step):
            found[:, start : start + step] = to_host(from_all_ranks(flat[start : start + step], group))
        return found.view(group.size(), *mine.shape)

    def _block_bytes(self) -> int:
        """Return the bytes of a block, on which all ranks agree: those of the hidden states between two layers.

        The forward pass has held these and more on every rank, at the least those of the smallest of the ranks' largest
        microbatches.
        """
        topology = self.topology
        tokens = min(max(of_microbatches) for of_microbatches in self.planned.plan.slots)
        of_rank = tokens // topology.context // (topology.tensor if topology.sequence else 1)
        return min(BLOCK_BYTES, of_rank * self.hidden_bytes)


@dataclass(frozen=True)
class OwnTokenValues:
    """The values of the tokens of this rank's own sequences, which no other replica needs.

    Attributes:
        microbatches: The numbers of the sequences of each microbatch, or `PADDING`.
        batch: The sharded batch.
        first_column: The first token of a sequence that has a value. The values of microbatches begin there too.
        topology: The layout.
    """

    microbatches: Sequence[Sequence[int]]
    batch: ShardedBatch
    first_column: int
    topology: Topology

    def on_host(self, streams: Sequence[Tensor], entry: Tensor) -> Tensor:
        """Return the value of every token [n, S, …] of this rank's sequences on the host. Collective.

        The arguments are those of `TokenValues.on_every_host`.
        """
        batch, topology = self.batch, self.topology
        counts = [list(map(self._count, sequences)) for sequences in self.microbatches]
        if topology.is_last_stage:
            mine = _flattened(streams, counts, topology.device)
        else:
            total = sum(map(sum, counts))
            mine = torch.zeros(total, *entry.shape, dtype=entry.dtype, device=topology.device)
        if topology.pipeline > 1:
            mine = mine.contiguous()
            dist.broadcast(mine, src=topology.last_stage_rank, group=topology.groups.pp)
        found = torch.zeros(len(batch.numbers) * batch.width, *entry.shape, dtype=entry.dtype)
        chosen = [number for sequences in self.microbatches for number in sequences if number != PADDING]
        indices = batch.numbers.searchsorted(chosen).tolist()
        found[_places([self._count(each) for each in chosen], indices, batch.width, self.first_column)] = to_host(mine)
        return found.unflatten(0, (-1, batch.width)) if len(batch.numbers) else found.view(0, batch.width, *entry.shape)

    def _count(self, number: int) -> int:
        """Return how many values a sequence has: a padding sequence has none."""
        return 0 if number == PADDING else max(int(self.batch.lengths[number]) - self.first_column, 0)


def _flattened(streams: Sequence[Tensor], counts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the values of microbatches one after the other, [n, …].

    Args:
        streams: [b, ·, …] of each microbatch.
        counts: How many values each sequence of each microbatch has.
        device: The device of the values.
    """
    places = [_places(each, range(len(each)), stream.size(1), 0) for each, stream in zip(counts, streams, strict=True)]
    values = [stream.flatten(0, 1)[at] for stream, at in zip(streams, send(places, device), strict=True)]
    return torch.cat(values)


def _places(counts: Sequence[int], indices: Sequence[int], width: int, column: int) -> Tensor:
    """Return the places of the values of sequences in a flattened tensor [·, width].

    Args:
        counts: How many values each sequence has.
        indices: The index of each of them in the tensor.
        width: The columns of the tensor.
        column: The first column with a value.
    """
    each = torch.tensor(counts, dtype=torch.long)
    starts = torch.tensor(indices, dtype=torch.long) * width + column - (each.cumsum(0) - each)
    return starts.repeat_interleave(each) + torch.arange(int(each.sum()))

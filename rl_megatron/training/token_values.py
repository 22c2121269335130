"""Bring the values of tokens from the ranks that computed them to the hosts of all ranks that have their sequences.

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

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.microbatch import PADDING, StepPlan
from rl_megatron.topology.collectives import gather_from_ranks
from rl_megatron.topology.topology import Topology
from rl_megatron.topology.transfer import send, to_host

BLOCK_BYTES = 1 << 25
"""The size on a device of the values that one collective gathers from all ranks, at most."""


@dataclass(frozen=True)
class TokenValues:
    """Which values of a planned batch are computed where. A value is […], one number or several.

    Attributes:
        batch: The batch.
        step: Its microbatches.
        first_column: The first token of a sequence that has a value. The values of microbatches begin there too.
        topology: The layout.
        hidden_bytes: The bytes of the hidden state of one token.
    """

    batch: Batch
    step: StepPlan
    first_column: int
    topology: Topology
    hidden_bytes: int

    def gather(self, streams: Sequence[Tensor], entry: Tensor) -> Tensor:
        """Return the value of every token [n, S, …] of the sequences that this rank has, on the host. Collective.

        Args:
            streams: [b, ·, …] of each of this rank's microbatches on the last pipeline stage, and none on other stages.
            entry: […] Zeros of the shape and dtype of one value. They fill entries without a value: those before
                `first_column` and those beyond a sequence's end.
        """
        batch, topology, place = self.batch, self.topology, self.step.index
        lengths = batch.lengths.tolist()

        def count(number: int) -> int:  # a padding sequence has no values
            return 0 if number == PADDING else max(lengths[number] - self.first_column, 0)

        counts = [[list(map(count, chosen)) for chosen in shapes.sequences] for shapes in self.step.ranks]
        totals = [sum(map(sum, of_rank)) for of_rank in counts]
        mine = torch.zeros(max(totals), *entry.shape, dtype=entry.dtype, device=topology.device)
        if topology.is_last_stage:
            mine[: totals[place]] = _flattened(streams, counts[place], topology.device)
        if topology.pipeline > 1:
            dist.broadcast(mine, src=topology.last_stage_rank, group=topology.groups.pp)
        found = torch.zeros(len(batch.numbers), batch.width, *entry.shape, dtype=entry.dtype)
        of_ranks = self._of_all_ranks(mine) if batch.is_whole else to_host(mine)[None]
        for shapes, total, values in zip(self.step.ranks, totals, of_ranks, strict=True):
            chosen = [number for number in chain.from_iterable(shapes.sequences) if number != PADDING]
            indices = torch.searchsorted(batch.numbers, torch.tensor(chosen, dtype=torch.long)).tolist()
            places = _places(list(map(count, chosen)), indices, batch.width, self.first_column)
            found.flatten(0, 1)[places] = values[:total]
        return found

    def _of_all_ranks(self, mine: Tensor) -> Tensor:
        """Return the values [ranks, n, …] of all data-parallel ranks on the host, from this rank's [n, …].

        A block may begin within a value, because one of every rank may already be too many bytes.
        """
        group, flat = self.topology.groups.dp, mine.flatten()
        step = max(1, self._block_bytes() // (group.size() * flat.element_size()))
        found = torch.empty(group.size(), len(flat), dtype=flat.dtype)
        for start in range(0, len(flat), step):
            found[:, start : start + step] = to_host(gather_from_ranks(flat[start : start + step], group))
        return found.view(group.size(), *mine.shape)

    def _block_bytes(self) -> int:
        """Return the bytes of a block, on which all ranks agree: those of the hidden states between two layers.

        The forward pass has held these and more on every rank, at the least those of the smallest of the ranks' largest
        microbatches.
        """
        topology = self.topology
        tokens = min(shapes.largest for shapes in self.step.ranks)
        of_rank = tokens // topology.context // (topology.tensor if topology.sequence else 1)
        return min(BLOCK_BYTES, of_rank * self.hidden_bytes)


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

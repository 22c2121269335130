"""Send per-token values from the ranks that computed them to the host memory of the ranks that have the sequences.

A device holds only the values of its own rank's sequences and one block of bounded size, for any number of ranks. The
block is not larger than the forward pass's hidden states, so that gathering does not raise the peak of memory.
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
"""The maximum size, on a device, of the values that one collective gathers from all ranks."""


@dataclass(frozen=True)
class TokenValues:
    """The values of a planned batch's tokens. A value has the shape […]: it is one number or several.

    Attributes:
        batch: The batch.
        step: Its microbatches.
        first_column: The index of a sequence's first token with a value. `streams` of `gather` begin with this token.
        topology: The layout.
        hidden_bytes: The bytes of the hidden state of one token.
    """

    batch: Batch
    step: StepPlan
    first_column: int
    topology: Topology
    hidden_bytes: int

    def gather(self, streams: Sequence[Tensor], entry: Tensor) -> Tensor:
        """Return the values [n, S, …] of all tokens of this rank's sequences, on the host. Collective.

        Args:
            streams: [b, ·, …] The values of each of this rank's microbatches on the last stage; empty on other stages.
            entry: […] Zeros of the shape and dtype of one value. They fill entries without a value: those before
                `first_column` and those beyond a sequence's end.
        """
        batch, topology = self.batch, self.topology
        lengths = batch.lengths.tolist()

        def count(number: int) -> int:  # a padding sequence has no values
            return 0 if number == PADDING else max(lengths[number] - self.first_column, 0)

        rank = self.step.index
        counts = [[list(map(count, members)) for members in planned.sequences] for planned in self.step.ranks]
        totals = [sum(map(sum, rank_counts)) for rank_counts in counts]
        local = torch.zeros(max(totals), *entry.shape, dtype=entry.dtype, device=topology.device)
        if topology.is_last_stage:
            local[: totals[rank]] = _flatten_streams(streams, counts[rank], topology.device)
        if topology.pipeline > 1:
            dist.broadcast(local, src=topology.last_stage_rank, group=topology.groups.pp)
        result = torch.zeros(len(batch.numbers), batch.width, *entry.shape, dtype=entry.dtype)
        gathered = self._gather_blocks(local) if batch.is_whole else to_host(local)[None]
        for planned, total, values in zip(self.step.ranks, totals, gathered, strict=True):
            numbers = [number for number in chain.from_iterable(planned.sequences) if number != PADDING]
            indices = torch.searchsorted(batch.numbers, torch.tensor(numbers, dtype=torch.long)).tolist()
            positions = _locate_values(list(map(count, numbers)), indices, batch.width, self.first_column)
            result.flatten(0, 1)[positions] = values[:total]
        return result

    def _gather_blocks(self, local: Tensor) -> Tensor:
        """Return the values [ranks, n, …] of all data-parallel ranks on the host, from this rank's [n, …].

        A block may end within a value, because even one value from every rank may be larger than a block.
        """
        group, flat = self.topology.groups.dp, local.flatten()
        step = max(1, self._block_bytes() // (group.size() * flat.element_size()))
        gathered = torch.empty(group.size(), len(flat), dtype=flat.dtype)
        for start in range(0, len(flat), step):
            gathered[:, start : start + step] = to_host(gather_from_ranks(flat[start : start + step], group))
        return gathered.view(group.size(), *local.shape)

    def _block_bytes(self) -> int:
        """Return the bytes of a block, the same on all ranks: at most those of the hidden states between two layers.

        The smallest among the ranks' largest microbatches counts, so every rank's forward pass has held at least as
        many bytes.
        """
        topology = self.topology
        tokens = min(planned.largest for planned in self.step.ranks)
        tokens = tokens // topology.context // (topology.tensor if topology.sequence else 1)
        return min(BLOCK_BYTES, tokens * self.hidden_bytes)


def _flatten_streams(streams: Sequence[Tensor], counts: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the values [n, …] of all microbatches, one after the other; `streams` has [b, ·, …] for each microbatch.

    `counts` has, for each microbatch, the number of values of each sequence.
    """
    positions = [
        _locate_values(sequence_counts, range(len(sequence_counts)), stream.size(1), 0)
        for sequence_counts, stream in zip(counts, streams, strict=True)
    ]
    values = [stream.flatten(0, 1)[index] for stream, index in zip(streams, send(positions, device), strict=True)]
    return torch.cat(values)


def _locate_values(counts: Sequence[int], indices: Sequence[int], width: int, column: int) -> Tensor:
    """Return the positions of the sequences' values in a flattened tensor [·, width].

    Args:
        counts: How many values each sequence has.
        indices: The index of each sequence in the tensor.
        width: The columns of the tensor.
        column: The first column with a value.
    """
    numbers = torch.tensor(counts, dtype=torch.long)
    starts = torch.tensor(indices, dtype=torch.long) * width + column - (numbers.cumsum(0) - numbers)
    return starts.repeat_interleave(numbers) + torch.arange(int(numbers.sum()))

"""A microbatch: rows that go through the model together, and what this rank's part of the model gets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad

from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.logprobs import Sharding
from rl_megatron.model.backend import packing_params
from rl_megatron.topology.context_parallel import zigzag_shard
from rl_megatron.topology.token_layout import TokenLayout
from rl_megatron.topology.topology import Topology


@dataclass(frozen=True)
class Microbatch:
    """Rows [b, S], whole on every rank. `lengths` [b]: they go packed into one row of the model, each with so many
    tokens; None: each has a row of its own, S tokens long."""

    batch: BatchedDataDict
    lengths: tuple[int, ...] | None = None

    def shape(self, topology: Topology) -> tuple[int, int]:
        """(rows, tokens of a row over all ranks) that the model runs on, padding included."""
        if self.lengths is not None:
            return 1, sum(rooms_of(self.lengths, topology))
        rows, width = self.batch["input_ids"].shape
        return rows, _round_up(width, topology.sequence_multiple)

    def weighing_nothing(self) -> Microbatch:
        """The same rows without weight: they run like any other and add nothing."""
        batch = BatchedDataDict(self.batch.get_dict())
        for mask in ("sample_mask", "token_mask"):
            if mask in batch:
                batch[mask] = torch.zeros_like(batch[mask])
        return replace(self, batch=batch)


@dataclass(frozen=True)
class ModelInput:
    """What this rank gives its model chunks: tokens [R, L], how they are packed, and how the output lies over ranks."""

    tokens: Tensor
    packing: PackedSeqParams | None
    sharding: Sharding

    @classmethod
    def of(cls, microbatch: Microbatch, topology: Topology, vocab_size: int, backend: str) -> ModelInput:
        ids, groups = microbatch.batch["input_ids"], topology.groups
        if microbatch.lengths is None:
            _, length = microbatch.shape(topology)
            padded = pad(ids, (0, length - ids.size(1)))
            tokens = zigzag_shard(padded, topology.context_rank, topology.context, dim=1)
            return cls(tokens, None, Sharding(groups.tp, groups.cp, vocab_size))
        rooms = rooms_of(microbatch.lengths, topology)
        cu_seqlens, cu_seqlens_padded = (
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (microbatch.lengths, rooms)
        )
        sharding = Sharding(groups.tp, groups.cp, vocab_size, cu_seqlens, cu_seqlens_padded)
        layout = TokenLayout.packed(
            cu_seqlens.to(ids.device),
            cu_seqlens_padded.to(ids.device),
            ids.size(1),
            sum(rooms) // topology.context,
            groups.cp,
        )
        return cls(layout.scatter(ids, 0), packing_params(rooms, topology, backend), sharding)


def rooms_of(lengths: Sequence[int], topology: Topology) -> list[int]:
    """Tokens that each sequence of a pack occupies: a multiple of 2·cp where context parallelism cuts it into that many
    chunks. The last room makes the whole pack divide over the sequence-parallel ranks too."""
    unit = 2 * topology.context if topology.context > 1 else 1
    rooms = [_round_up(max(length, 1), unit) for length in lengths]
    total = sum(rooms)
    rooms[-1] += _round_up(total, topology.sequence_multiple) - total
    return rooms


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

"""A microbatch: rows that go through the model together, and what this rank's part of the model gets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_megatron.batching.plan import round_up
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.logprobs import Sharding
from rl_megatron.model.backend import packing_params
from rl_megatron.model.build import unwrap
from rl_megatron.topology.context_parallel import zigzag_chunks
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
        return rows, round_up(width, topology.sequence_multiple)

    def weighing_nothing(self) -> Microbatch:
        """The same rows without weight: they run like any other and add nothing."""
        batch = BatchedDataDict(self.batch.get_dict())
        for mask in ("sample_mask", "token_mask"):
            if mask in batch:
                batch[mask] = torch.zeros_like(batch[mask])
        return replace(self, batch=batch)


@dataclass(frozen=True)
class ModelInput:
    """What this rank gives its model chunks: tokens [R, L]; how they are packed; how the output lies over ranks; and
    which tokens no expert should be balanced by, [R, L], where experts are."""

    tokens: Tensor
    packing: PackedSeqParams | None
    sharding: Sharding
    padding: Tensor | None

    @classmethod
    def of(
        cls, microbatch: Microbatch, topology: Topology, vocab_size: int, backend: str, balances_experts: bool
    ) -> ModelInput:
        batch, groups = microbatch.batch, topology.groups
        ids = batch["input_ids"]
        local_length = microbatch.shape(topology)[1] // topology.context
        if microbatch.lengths is None:
            packing, sharding = None, Sharding(groups.tp, groups.cp, vocab_size)
            layout = TokenLayout.padded(tuple(ids.shape), local_length, groups.cp, ids.device)
        else:
            rooms = rooms_of(microbatch.lengths, topology)
            lengths, padded = (
                torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (microbatch.lengths, rooms)
            )
            packing = packing_params(rooms, topology, backend)
            sharding = Sharding(groups.tp, groups.cp, vocab_size, lengths, padded)
            layout = TokenLayout.packed(
                lengths.to(ids.device), padded.to(ids.device), ids.size(1), local_length, groups.cp
            )
        padding = ~layout.scatter(_weighing(batch), False) if balances_experts else None
        return cls(layout.scatter(ids, 0), packing, sharding, padding)

    def padding_of(self, chunk: torch.nn.Module, topology: Topology) -> Tensor:
        """`padding` as megatron-core wants it of this chunk: with the embedding's it cuts it over sequence-parallel
        ranks itself, with others' it expects that done."""
        if topology.sequence and not unwrap(chunk).pre_process:
            return self.padding.chunk(topology.tensor, dim=1)[topology.tensor_rank]
        return self.padding


def _weighing(batch: BatchedDataDict) -> Tensor:
    """[b, S], true for every token within its row, of rows that weigh anything."""
    ids = batch["input_ids"]
    weighs = (batch["sample_mask"] > 0)[:, None].expand(ids.shape)
    if "input_lengths" not in batch:
        return weighs
    return weighs & (torch.arange(ids.size(1), device=ids.device) < batch["input_lengths"].to(ids.device)[:, None])


def rooms_of(lengths: Sequence[int], topology: Topology) -> list[int]:
    """Tokens that each sequence of a pack occupies: a multiple of 2·cp where context parallelism cuts it into that many
    chunks. The last room makes the whole pack divide over the sequence-parallel ranks too."""
    chunks = zigzag_chunks(topology.context)
    rooms = [round_up(max(length, 1), chunks) for length in lengths]
    total = sum(rooms)
    rooms[-1] += round_up(total, topology.sequence_multiple) - total
    return rooms

"""Which rows form which microbatch on which data-parallel rank: one plan for all ranks, made before any of them starts.

Every rank plans for every rank, from the whole global batch, so all agree on how many microbatches there are: ranks
that chose their own would wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.plan import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    plan_dynamic_batching,
    plan_padded,
    plan_sequence_packing,
    round_up,
)
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution import Microbatch
from rl_megatron.topology.context_parallel import zigzag_chunks
from rl_megatron.topology.topology import Topology


@dataclass(frozen=True)
class Batching:
    """How rows form microbatches, in `kind`'s way:

    padded: `rows` rows at a time, each as wide as the global batch.
    dynamic: rows of like length, each as wide as their longest, `tokens` at most.
    packed: rows one after the other in one, `tokens` at most.
    """

    kind: Literal["padded", "dynamic", "packed"] = "padded"
    rows: int = 8
    tokens: int = 4096

    def plan(
        self,
        batch: BatchedDataDict,
        lengths: list[int],
        topology: Topology,
        unit: int = 1,
        cost: SequenceCost = SequenceCost(),
    ) -> Planned:
        """Of a global batch whose rows have so many tokens; `unit` rows in a row stay together. Packs are balanced by
        the `cost` of their sequences.

        Raises: ConfigError where a unit alone exceeds `tokens`.
        """
        num_rows, shards, multiple = batch.size, topology.data, topology.sequence_multiple
        per_rank = -(-num_rows // (shards * unit)) * unit
        rows = min(self.rows, per_rank)
        batch = batch.pad_to_multiple(shards * (rows if self.kind == "padded" else unit))
        if batch.size > num_rows and "input_lengths" in batch:
            batch["input_lengths"][num_rows:] = 1  # a token is enough of a filler
        tokens = sum(lengths)
        lengths = [max(length, 1) for length in lengths] + [1] * (batch.size - num_rows)
        width = round_up(batch["input_ids"].size(1), multiple)
        budget = self.tokens // multiple * multiple  # what a microbatch is padded to stays within
        try:
            if self.kind == "padded":
                plan = plan_padded(lengths, width, shards, rows, cost)
            elif self.kind == "dynamic":
                args = DynamicBatchingArgs(budget, unit_size=unit, cost=cost, sequence_length_round=multiple)
                plan = plan_dynamic_batching(lengths, width, shards, args)
            else:
                chunks = zigzag_chunks(topology.context)
                args = SequencePackingArgs(budget, unit_size=unit, cost=cost, sequence_length_pad_multiple=chunks)
                plan = plan_sequence_packing(lengths, shards, args)
        except ValueError as error:
            raise ConfigError(f"train.batching={self.kind}, train.micro_batch_tokens={self.tokens}: {error}") from error
        mine = plan.rows[topology.data_rank]
        microbatches = [
            self._microbatch(batch, chosen, lengths, cut)
            for chosen, cut in zip(mine, plan.lengths[topology.data_rank], strict=True)
        ]
        slots = sum(round_up(slots, multiple) for slots in chain.from_iterable(plan.slots))
        return Planned(microbatches, tuple(chain.from_iterable(mine)), num_rows, batch.size, tokens / slots)

    def _microbatch(self, batch: BatchedDataDict, rows: list[int], lengths: list[int], width: int) -> Microbatch:
        if self.kind == "padded":
            return Microbatch(batch.select_indices(rows))
        if self.kind == "dynamic":
            return Microbatch(_cut(batch, width).select_indices(rows))
        mine = tuple(lengths[row] for row in rows)
        return Microbatch(_cut(batch, max(mine)).select_indices(rows), mine)


@dataclass(frozen=True)
class Planned:
    """This data-parallel rank's microbatches, equally many on every rank.

    rows: where their rows, one microbatch after the other, lie in the global batch of `num_rows` rows; numbers from
        there to `num_padded` are fillers without weight.
    efficiency: tokens of the global batch per token slot that the model computes, over all ranks; the microbatches
        without weight that an interleaved pipeline may add are left out.
    """

    microbatches: list[Microbatch]
    rows: tuple[int, ...]
    num_rows: int
    num_padded: int
    efficiency: float

    def spread(self, streams: list[Tensor], width: int, first_column: int, entry: Tensor) -> Tensor:
        """[num_rows, width, …], `entry` […] of zeros where this rank has nothing to say, from [b, ·, …] of each
        microbatch, whose column 0 is column `first_column` of the whole."""
        whole, start = entry.expand(self.num_padded, width, *entry.shape).clone(), 0
        for stream in streams:
            rows = torch.tensor(self.rows[start : start + stream.size(0)], device=entry.device)
            whole[rows, first_column : first_column + stream.size(1)] = stream
            start += stream.size(0)
        return whole[: self.num_rows]


def _cut(batch: BatchedDataDict, width: int) -> BatchedDataDict:
    """The first `width` tokens: of every tensor as wide as the tokens, and of no other."""
    whole = batch["input_ids"].size(1)
    return BatchedDataDict(
        {
            key: value[:, :width] if isinstance(value, Tensor) and value.dim() > 1 and value.size(1) == whole else value
            for key, value in batch.items()
        }
    )


def row_lengths(batch: Mapping[str, Tensor]) -> list[int]:
    """Tokens of each row: its `input_lengths`, or all of its width.

    Raises: ValueError where a length does not fit the width, or a token that counts lies past its row's end.
    """
    rows, width = batch["input_ids"].shape
    if "input_lengths" not in batch:
        return [width] * rows
    lengths = batch["input_lengths"].cpu()
    wrong = ((lengths < 0) | (lengths > width)).nonzero()
    if len(wrong):
        row = wrong[0].item()
        raise ValueError(f"input_lengths[{row}]={lengths[row].item()} does not fit rows of {width} tokens")
    if "token_mask" in batch:
        mask = batch["token_mask"].cpu()
        lost = ((mask != 0) & (torch.arange(width) >= lengths[:, None])).nonzero()
        if len(lost):
            row, position = lost[0].tolist()
            raise ValueError(
                f"token_mask[{row}, {position}] counts a token past the row's end: input_lengths[{row}]="
                f"{lengths[row].item()}"
            )
    return lengths.tolist()

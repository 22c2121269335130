"""`ShardedBatch`: a global batch of which every data-parallel rank has its own sequences, and a few numbers of all."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_megatron.batching.exchange import FILLS, Column, Columns, Exchange, Moved, columns_of
from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.batching.ownership import PADDING, OwnedStep, Ownership
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.token_keys import is_per_token
from rl_megatron.topology.reductions import RankReduction
from rl_megatron.topology.topology import Topology

LENGTHS, TRAJECTORIES, SAMPLED, DATA_SET = "input_lengths", "trajectory", "sampled_tokens", "data_set"
"""Facts of sequences: their tokens, the numbers of their trajectories, how many of their tokens count, and the place of
their data set in `data.mix`, if an algorithm reads it."""


@dataclass
class ShardedBatch(MutableMapping[str, Tensor]):
    """Sequences of a global batch, numbered from 0. As a mapping it has this rank's own sequences.

    All ranks of a data-parallel replica have the same sequences. Before they were moved to their owners, a rank has
    those that it has produced; see `produced`.

    Attributes:
        own: This rank's sequences in the order of their numbers.
        numbers: [n] int64. Their numbers in the global batch.
        facts: [B] numbers of all sequences of the global batch, by name, the same on every rank.
        homes: [B] The data-parallel rank on which each sequence was produced.
        width: The columns of the tensors of all ranks.
        columns: The keys that can be moved between ranks.
        padding: The first token of a sequence with its other values, with a weight of zero, for padding sequences.
        topology: The layout; None in a single process.
        owners: [B] The data-parallel rank that owns each sequence; None before they were moved.
        steps: The optimizer steps that were planned with the ownership.
        store: Where tensors are kept.
        moved: The bytes that this rank has exchanged with others for the batch.
    """

    own: BatchedDataDict
    numbers: np.ndarray
    facts: dict[str, Tensor]
    homes: np.ndarray
    width: int
    columns: Columns
    padding: dict[str, Tensor]
    topology: Topology | None = None
    owners: np.ndarray | None = None
    steps: list[OwnedStep] = field(default_factory=list)
    store: TensorStore = field(default_factory=TensorStore)
    moved: Moved = field(default_factory=Moved)

    def __getitem__(self, key: str) -> Any:
        """Return the values of this rank's sequences."""
        return self.own[key]

    def __setitem__(self, key: str, values: Tensor) -> None:
        """Add values of this rank's sequences, [n, …]."""
        if len(values) != len(self.numbers):
            raise ValueError(f"key {key!r} has {len(values)} sequences, and this rank has {len(self.numbers)}")
        self.own[key] = self.store.kept(values)

    def __delitem__(self, key: str) -> None:
        del self.own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)

    def __contains__(self, key: object) -> bool:
        return key in self.own

    @property
    def size(self) -> int:
        """Return the number of sequences of the global batch."""
        return len(self.facts[LENGTHS])

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each sequence of the global batch, int32."""
        return self.facts[LENGTHS].numpy()

    @property
    def num_tokens(self) -> int:
        """Return the tokens of the global batch, without padding."""
        return int(self.facts[LENGTHS].sum(dtype=torch.int64))

    @property
    def ranks(self) -> RankReduction:
        """Return the data-parallel ranks that share the batch."""
        return reduction_over(self.topology)

    def trajectories(self) -> Tensor:
        """Return the number of the trajectory of each sequence of the global batch, [B] int64, from 0 without a gap."""
        if TRAJECTORIES in self.facts:
            return self.facts[TRAJECTORIES].long()
        return torch.arange(self.size)

    @property
    def num_trajectories(self) -> int:
        """Return the number of trajectories of the global batch."""
        return int(self.trajectories()[-1]) + 1 if self.size else 0

    def own_facts(self, values: Tensor) -> Tensor:
        """Return this rank's part [n, …] of values [B, …] of the global batch."""
        return values[torch.from_numpy(self.numbers)]

    def selected(self, chosen: Tensor) -> ShardedBatch:
        """Return the batch with the chosen sequences of the global batch only; `chosen` is [B] bool on every rank.

        Those that have owners keep them. A rank may be left with none.
        """
        kept = chosen.numpy()
        is_own = kept[self.numbers]
        places = np.cumsum(kept) - 1
        own = self.own.select_indices(torch.from_numpy(is_own)) if len(self.own) else self.own
        facts = {name: values[chosen] for name, values in self.facts.items()}
        selected = self._with(own, places[self.numbers[is_own]], facts, self.homes[kept], self.width)
        return selected if self.owners is None else replace(selected, owners=self.owners[kept], moved=self.moved)

    def _with(
        self, own: BatchedDataDict, numbers: np.ndarray, facts: dict[str, Tensor], homes: np.ndarray, width: int
    ) -> ShardedBatch:
        """Return a batch that was not moved yet, with trajectories numbered without a gap."""
        if TRAJECTORIES in facts:
            facts = facts | {TRAJECTORIES: _without_gaps(facts[TRAJECTORIES])}
            if TRAJECTORIES in own:
                own = BatchedDataDict(own)
                own[TRAJECTORIES] = facts[TRAJECTORIES][torch.from_numpy(numbers)].to(own[TRAJECTORIES])
        return replace(
            self, own=own, numbers=numbers, facts=facts, homes=homes, width=width, owners=None, steps=[], moved=Moved()
        )

    @classmethod
    def joined(cls, parts: Sequence[ShardedBatch]) -> ShardedBatch:
        """Return the sequences of several batches, one batch after the other. None of them was moved yet."""
        first = parts[0]
        if len(parts) == 1:
            return first
        starts = np.cumsum([0, *(part.size for part in parts)])
        there = [part.own for part in parts if len(part.numbers)]
        own = BatchedDataDict.from_batches(there, FILLS) if there else first.own
        facts = {name: torch.cat([part.facts[name] for part in parts]) for name in first.facts}
        if TRAJECTORIES in facts:
            before, numbered = 0, []
            for part in parts:
                numbered.append(part.facts[TRAJECTORIES] + before)
                before += int(part.facts[TRAJECTORIES][-1]) + 1 if part.size else 0
            facts[TRAJECTORIES] = torch.cat(numbered)
        numbers = np.concatenate([part.numbers + start for part, start in zip(parts, starts, strict=False)])
        homes = np.concatenate([part.homes for part in parts])
        return first._with(own, numbers, facts, homes, max(part.width for part in parts))

    def moved_to(self, ownership: Ownership) -> ShardedBatch:
        """Return the batch with every sequence on its owner. Collective. Every sequence is moved at most once."""
        exchange = Exchange(self.lengths, self.homes, ownership.owners, self.topology, moved=self.moved)
        if self.topology is None or self.topology.world_size == 1:
            own = self.own.map_values(self.store.kept, list)
        else:
            own = exchange.run(self.own, self.numbers, self.columns, self.width, self.store)
        numbers = np.flatnonzero(ownership.owners == exchange.rank)
        return replace(self, own=own, numbers=numbers, owners=ownership.owners, steps=ownership.steps)

    def at_homes(self, keys: Sequence[str]) -> BatchedDataDict:
        """Return these keys of the sequences that this rank has produced, in the order of their numbers. Collective.

        Only the first rank of a data-parallel replica gets any; a single process has produced all of them.
        """
        columns, found = self._columns_of_own(keys), BatchedDataDict({key: self.own[key] for key in keys})
        if self.owners is None or self.topology is None or self.topology.world_size == 1:
            return found
        exchange = Exchange(self.lengths, self.owners, self.homes, self.topology, moved=self.moved)
        return exchange.run(found, self.numbers, columns, self.width, TensorStore())

    def on_rank_0(self, keys: Sequence[str]) -> BatchedDataDict:
        """Return these keys of all sequences on the ranks of the first replica, and of none on others. Collective."""
        if self.owners is None or self.topology is None or self.topology.world_size == 1:
            return BatchedDataDict({key: self.own[key] for key in keys})
        exchange = Exchange(self.lengths, self.owners, np.zeros_like(self.owners), self.topology, moved=self.moved)
        found = BatchedDataDict({key: self.own[key] for key in keys})
        return exchange.run(found, self.numbers, self._columns_of_own(keys), self.width, TensorStore())

    def from_rank_0(self, key: str, made: BatchedDataDict) -> Tensor:
        """Return a value of each token, [n, width] fp32, of this rank's sequences. Collective.

        Args:
            key: The key.
            made: The values of all sequences on the ranks of the first replica; it may be empty on others.
        """
        if self.owners is None or self.topology is None or self.topology.world_size == 1:
            return made[key]
        exchange = Exchange(self.lengths, np.zeros_like(self.owners), self.owners, self.topology, moved=self.moved)
        columns = {key: Column(torch.float32, (), per_token=True)}
        return exchange.run(made, np.arange(len(made.get(key, ()))), columns, self.width, TensorStore())[key]

    def _columns_of_own(self, keys: Sequence[str]) -> Columns:
        every = columns_of(self.own)
        return {key: every[key] for key in keys}

    def sequences(self, chosen: Sequence[int], width: int) -> BatchedDataDict:
        """Return copies of some of this rank's sequences.

        Args:
            chosen: Their numbers in the global batch, and behind them `PADDING` for each padding sequence of zero loss
                weight.
            width: The columns to return of tensors that have a value for each token.
        """
        real = [number for number in chosen if number != PADDING]
        places = torch.from_numpy(np.searchsorted(self.numbers, real))
        found = BatchedDataDict()
        for key, values in self.own.items():
            part = (values[:, :width] if is_per_token(key, values, self.width) else values)[places]
            missing = len(chosen) - len(real)
            found[key] = torch.cat([part, self._padding_of(key, part, missing)]) if missing else part
        return found

    def _padding_of(self, key: str, like: Tensor, number: int) -> Tensor:
        """Return the values of padding sequences with the shape and dtype of `like`."""
        values = like.new_full((number, *like.shape[1:]), FILLS.get(key, 0))
        if key in self.padding:
            first = self.padding[key]
            if first.dim() > 1 and first.size(1) == 1 and values.dim() > 1:
                values[:, :1] = first
            else:
                values[:] = first
        return values


def reduction_over(topology: Topology | None) -> RankReduction:
    """Return the data-parallel ranks of a layout."""
    return RankReduction() if topology is None else RankReduction(topology.groups.dp, topology.device)


def _without_gaps(numbers: Tensor) -> Tensor:
    """Return the trajectories' numbers, which do not decrease, from 0 without a gap."""
    changes = torch.ones_like(numbers)
    changes[1:] = (numbers.diff() != 0).to(numbers)
    return changes.cumsum(0).to(numbers) - 1

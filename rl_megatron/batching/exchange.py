"""Move sequences once, from the ranks that produced them to the data-parallel ranks that own them.

Sequences travel in rounds of bounded size, each key in its own dtype and without padding. One rank of every
data-parallel replica takes part in the exchange over replicas. It then shares what it got with the ranks of its own
replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.batching.routing import ROUTED_EXPERTS, UNKNOWN_EXPERT
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.token_keys import is_per_token

if TYPE_CHECKING:  # the topology imports megatron-core, which showing a batch does without
    from rl_megatron.topology.topology import Topology

ROUND_BYTES = 1 << 26
"""The bytes that a rank sends in one round, at most, unless one sequence alone is larger."""

FILLS: dict[str, int] = {ROUTED_EXPERTS: UNKNOWN_EXPERT, "turn": -1, "token_weight_versions": -1}
"""What is behind the end of a sequence, for keys of which it is not 0."""


@dataclass
class Moved:
    """Bytes that this rank has sent to other ranks and received from them."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Column:
    """A key of a batch.

    Attributes:
        dtype: The dtype of its tensor.
        shape: The dimensions of one value: of a token, or of a sequence.
        per_token: Whether it has a value for each token.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    per_token: bool

    @property
    def bytes(self) -> int:
        """Return the bytes of one value."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, store: TensorStore, key: str, number: int, width: int) -> Tensor:
        """Return a tensor for so many sequences of `width` columns, filled with what is behind a sequence's end."""
        shape = (number, width, *self.shape) if self.per_token else (number, *self.shape)
        return store.full(shape, FILLS.get(key, 0), self.dtype)


Columns = dict[str, Column]


def columns_of(batch: Mapping[str, Tensor]) -> Columns:
    """Return the columns of a batch.

    Raises:
        TypeError: A value is not a tensor.
    """
    width, found = batch["input_ids"].size(1), {}
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"key {key!r} holds a {type(value).__name__}; only tensors can be moved between ranks")
        per_token = is_per_token(key, value, width)
        found[key] = Column(value.dtype, tuple(value.shape[2 if per_token else 1 :]), per_token)
    return found


@dataclass(frozen=True)
class Exchange:
    """Which sequences go from which data-parallel rank to which.

    Attributes:
        lengths: [B] The tokens of each sequence of the global batch.
        sources: [B] The data-parallel rank that has each sequence.
        targets: [B] The data-parallel rank that gets it.
        topology: The layout; None in a single process.
        round_bytes: The bytes that a rank sends in one round, at most.
    """

    lengths: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    topology: Topology | None
    round_bytes: int = ROUND_BYTES
    moved: Moved = field(default_factory=Moved)

    @property
    def rank(self) -> int:
        """Return this data-parallel rank."""
        return 0 if self.topology is None else self.topology.data_rank

    def run(
        self, own: Mapping[str, Tensor], numbers: np.ndarray, columns: Columns, width: int, store: TensorStore
    ) -> BatchedDataDict:
        """Return the sequences that this rank gets, in the order of their numbers. Collective.

        Args:
            own: The sequences that this rank has. Only the first rank of a replica has any.
            numbers: Their numbers, ascending.
            columns: The keys that are moved.
            width: The columns of the tensors that are returned.
            store: Where these are kept.
        """
        mine = np.flatnonzero(self.targets == self.rank)
        found = {key: column.empty(store, key, len(mine), width) for key, column in columns.items()}
        rounds = self._rounds(columns)
        for number in range(int(rounds.max()) + 1 if len(rounds) else 0):
            of_round = np.flatnonzero(rounds == number)
            sent = of_round[self.sources[of_round] == self.rank]
            sent = sent[np.argsort(self.targets[sent], kind="stable")]
            got = of_round[self.targets[of_round] == self.rank]
            got = got[np.argsort(self.sources[got], kind="stable")]
            payload = self._received(own, numbers, columns, sent, got)
            indices = np.searchsorted(mine, got)
            for key, values in self._by_key(payload, columns, got).items():
                self._write(found[key], values, columns[key], got, indices)
        return BatchedDataDict(found)

    def _rounds(self, columns: Columns) -> np.ndarray:
        """Return [B] the round in which each sequence travels; every rank comes to the same."""
        of_token = sum(column.bytes for column in columns.values() if column.per_token)
        of_sequence = sum(column.bytes for column in columns.values() if not column.per_token)
        order = np.argsort(self.sources, kind="stable")
        sizes = self.lengths[order].astype(np.int64) * of_token + of_sequence
        before = np.cumsum(sizes) - sizes
        sources = self.sources[order]
        starts = np.flatnonzero(np.r_[True, sources[1:] != sources[:-1]]) if len(order) else np.zeros(0, dtype=int)
        before -= np.repeat(before[starts], np.diff(np.r_[starts, len(order)]))
        rounds = np.empty(len(order), dtype=np.int64)
        rounds[order] = before // self.round_bytes
        return rounds

    def _received(
        self, own: Mapping[str, Tensor], numbers: np.ndarray, columns: Columns, sent: np.ndarray, got: np.ndarray
    ) -> Tensor:
        """Return the bytes of the sequences `got`, from this rank's `sent` and those of others.

        The bytes of each source follow those of the one before. Within a source, those of each key do.
        """
        topology = self.topology
        into = self._splits(columns, got, self.sources)
        if topology is not None and not is_first_of_replica(topology):
            payload = torch.empty(int(into.sum()), dtype=torch.uint8, device=topology.device)
            self.moved.received += len(payload)
        else:
            payload = self._packed(own, numbers, columns, sent)
            if topology is not None and topology.data > 1:
                payload = self._over_replicas(payload, self._splits(columns, sent, self.targets), into, topology)
        if topology is None or topology.world_size == topology.data:
            return payload.cpu()
        return from_first_of_replica(payload.to(topology.device), topology).cpu()

    def _over_replicas(self, packed: Tensor, out: np.ndarray, into: np.ndarray, topology: Topology) -> Tensor:
        """Return the bytes that other replicas' first ranks have for this one, by source.

        Args:
            packed: The bytes for each target, one after the other.
            out: [keys, ranks] The bytes of each key for each target.
            into: [keys, ranks] The bytes of each key from each source.
            topology: The layout.
        """
        sizes_out, sizes_into = out.sum(0), into.sum(0)
        found = torch.empty(int(sizes_into.sum()), dtype=torch.uint8, device=topology.device)
        dist.all_to_all_single(
            found, packed.to(topology.device), sizes_into.tolist(), sizes_out.tolist(), group=topology.groups.dp
        )
        self.moved.sent += int(sizes_out.sum() - sizes_out[self.rank])
        self.moved.received += int(sizes_into.sum() - sizes_into[self.rank])
        return found

    def _splits(self, columns: Columns, chosen: np.ndarray, peers: np.ndarray) -> np.ndarray:
        """Return [keys, ranks] the bytes of each key of the chosen sequences by the rank that `peers` has for each."""
        ranks = 1 if self.topology is None else self.topology.data
        of = peers[chosen]
        numbers = np.bincount(of, minlength=ranks)
        tokens = np.bincount(of, weights=self.lengths[chosen], minlength=ranks).astype(np.int64)
        return np.array([(tokens if each.per_token else numbers) * each.bytes for each in columns.values()])

    def _packed(self, own: Mapping[str, Tensor], numbers: np.ndarray, columns: Columns, sent: np.ndarray) -> Tensor:
        """Return the bytes of sequences that this rank has: target by target, and within a target key by key."""
        if not len(sent):
            return torch.empty(0, dtype=torch.uint8)
        indices = np.searchsorted(numbers, sent)
        each = [self._values(own[key], column, sent, indices) for key, column in columns.items()]
        sizes = self._splits(columns, sent, self.targets)
        parts = [values.split(of_key) for values, of_key in zip(each, sizes.tolist(), strict=True)]
        return torch.cat([parts[key][target] for target in np.flatnonzero(sizes.any(0)) for key in range(len(parts))])

    def _by_key(self, payload: Tensor, columns: Columns, got: np.ndarray) -> dict[str, Tensor]:
        """Return the bytes of each key, source by source."""
        sizes = self._splits(columns, got, self.sources)
        sizes = sizes[:, sizes.any(0)]
        parts = payload.split(sizes.T.flatten().tolist())
        return {key: torch.cat(parts[number :: len(columns)]) for number, key in enumerate(columns) if len(got)}

    def _values(self, values: Tensor, column: Column, sent: np.ndarray, indices: np.ndarray) -> Tensor:
        """Return the bytes of the values of sequences, one sequence after the other."""
        if column.per_token:
            flat = values.flatten(0, 1)[self._places(sent, indices, values.size(1))]
        else:
            flat = values[torch.from_numpy(indices)]
        return flat.contiguous().view(-1).view(torch.uint8)

    def _write(self, found: Tensor, payload: Tensor, column: Column, got: np.ndarray, indices: np.ndarray) -> None:
        """Write the values of sequences into their places in a tensor."""
        values = payload.view(column.dtype).view(-1, *column.shape)
        if column.per_token and len(got):
            found.flatten(0, 1)[self._places(got, indices, found.size(1))] = values
        elif len(got):
            found[torch.from_numpy(indices)] = values

    def _places(self, chosen: np.ndarray, indices: np.ndarray, width: int) -> Tensor:
        """Return the places of the tokens of sequences in a flattened tensor [·, width] that has them at `indices`."""
        counts = self.lengths[chosen].astype(np.int64)
        starts = indices * width - (np.cumsum(counts) - counts)
        return torch.from_numpy(np.repeat(starts, counts) + np.arange(int(counts.sum())))


def is_first_of_replica(topology: Topology) -> bool:
    """Return whether this is the rank that exchanges data for its data-parallel replica."""
    return topology.tensor_rank == topology.context_rank == topology.pipeline_rank == 0


def from_first_of_replica(values: Tensor, topology: Topology) -> Tensor:
    """Return the values of the replica's first rank on all of its ranks. Collective within the replica.

    The first rank sends them to the other pipeline stages, each of these to its context-parallel ranks, and each of
    those to its tensor-parallel ranks. So every rank receives them once.
    """
    groups = topology.groups
    steps: Sequence[tuple[dist.ProcessGroup, bool]] = (
        (groups.pp, topology.tensor_rank == topology.context_rank == 0),
        (groups.cp, topology.tensor_rank == 0),
        (groups.tp, True),
    )
    for group, takes_part in steps:
        if takes_part and group.size() > 1:
            dist.broadcast(values, src=dist.get_global_rank(group, 0), group=group)
    return values

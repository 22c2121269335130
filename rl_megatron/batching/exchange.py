"""Move sequences once, from the ranks that produced them to the data-parallel ranks that own them.

Sequences travel in rounds of bounded size, each key in its own dtype and without padding. One rank of every
data-parallel replica takes part in the exchange over replicas. It then shares what it got with the ranks of its own
replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.batching.routing import ROUTED_EXPERTS, UNKNOWN_EXPERT
from rl_megatron.data.batch import BatchedDataDict
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
        per_token = value.dim() > 1 and value.size(1) == width
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
            for key, column in columns.items():
                payload = self._received(own, numbers, key, column, sent, got)
                self._write(found[key], payload, column, got, np.searchsorted(mine, got))
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
        self, own: Mapping[str, Tensor], numbers: np.ndarray, key: str, column: Column, sent: np.ndarray,
        got: np.ndarray,
    ) -> Tensor:  # fmt: skip
        """Return the values of the sequences `got`, one after the other, from this rank's `sent` and others'."""
        topology = self.topology
        expected = self._sizes(column, got)
        if topology is None or topology.data == 1:
            leads = topology is None or is_first_of_replica(topology)
            payload = self._packed(own, numbers, key, column, sent) if leads else None
        elif is_first_of_replica(topology):
            payload = self._over_replicas(self._packed(own, numbers, key, column, sent), column, sent, got)
        else:
            payload = None
        if topology is None or topology.world_size == topology.data:
            assert payload is not None  # every rank is the first of its replica
            return payload
        if payload is None:
            payload = torch.empty(int(expected.sum()), dtype=torch.uint8, device=topology.device)
            self.moved.received += len(payload)
        return from_first_of_replica(payload.to(topology.device), topology).cpu()

    def _over_replicas(self, packed: Tensor, column: Column, sent: np.ndarray, got: np.ndarray) -> Tensor:
        topology = self.topology
        assert topology is not None  # there are replicas
        out, into = self._splits(column, sent, self.targets), self._splits(column, got, self.sources)
        found = torch.empty(sum(into), dtype=torch.uint8, device=topology.device)
        dist.all_to_all_single(found, packed.to(topology.device), into, out, group=topology.groups.dp)
        self.moved.sent += sum(out) - out[self.rank]
        self.moved.received += sum(into) - into[self.rank]
        return found.cpu()

    def _splits(self, column: Column, chosen: np.ndarray, peers: np.ndarray) -> list[int]:
        """Return the bytes of the chosen sequences by the data-parallel rank that `peers` names for each."""
        assert self.topology is not None  # there are replicas
        found = np.bincount(peers[chosen], weights=self._sizes(column, chosen), minlength=self.topology.data)
        return found.astype(np.int64).tolist()

    def _sizes(self, column: Column, chosen: np.ndarray) -> np.ndarray:
        """Return the bytes of each of the chosen sequences."""
        return (self.lengths[chosen].astype(np.int64) if column.per_token else np.ones_like(chosen)) * column.bytes

    def _packed(
        self, own: Mapping[str, Tensor], numbers: np.ndarray, key: str, column: Column, sent: np.ndarray
    ) -> Tensor:
        """Return the bytes of the values of sequences that this rank has, one sequence after the other."""
        if not len(sent):
            return torch.empty(0, dtype=torch.uint8)
        indices, values = np.searchsorted(numbers, sent), own[key]
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

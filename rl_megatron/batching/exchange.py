"""Move sequences once, from the ranks that produced them to the data-parallel ranks that own them.

Sequences are sent in rounds of bounded size, each key in its own dtype and without padding. The first ranks of all
data-parallel replicas exchange sequences. Each then broadcasts what it received to the other ranks of its replica.
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

if TYPE_CHECKING:  # the topology imports megatron-core, which code that only shows a batch does not need
    from rl_megatron.topology.topology import Topology

ROUND_BYTES = 1 << 26
"""The bytes that a rank sends in one round. A round's last sequence may exceed them."""

FILLS: dict[str, int] = {ROUTED_EXPERTS: UNKNOWN_EXPERT, "turn": -1, "token_weight_versions": -1}
"""The padding value of keys that are not padded with 0."""


@dataclass
class Traffic:
    """Bytes that this rank has sent to other ranks and received from them."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Column:
    """A key of a batch.

    Attributes:
        shape: The shape of one value, which belongs to a token (`per_token`) or to a sequence.
        per_token: Whether the key has a value for each token, or one for each sequence.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    per_token: bool

    @property
    def bytes(self) -> int:
        """Return the bytes of one value."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def allocate(self, store: TensorStore, key: str, number: int, width: int) -> Tensor:
        """Return a tensor for `number` sequences of `width` columns, filled with the key's padding value."""
        shape = (number, width, *self.shape) if self.per_token else (number, *self.shape)
        return store.full(shape, FILLS.get(key, 0), self.dtype)


Columns = dict[str, Column]


def read_columns(batch: Mapping[str, Tensor]) -> Columns:
    """Return the columns of a batch, whose values must all be tensors."""
    width, columns = batch["input_ids"].size(1), {}
    for key, value in batch.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"key {key!r} holds a {type(value).__name__}; only tensors can be moved between ranks")
        per_token = is_per_token(key, value, width)
        columns[key] = Column(value.dtype, tuple(value.shape[2 if per_token else 1 :]), per_token)
    return columns


@dataclass(frozen=True)
class Exchange:
    """A move of the sequences of a global batch between data-parallel ranks.

    Attributes:
        lengths: [B] The number of tokens of each sequence of the global batch.
        sources: [B] The data-parallel rank that sends each sequence.
        targets: [B] The data-parallel rank that receives each sequence.
        topology: The layout; None in a single process.
        round_bytes: The bytes that a rank sends in one round; see `ROUND_BYTES`.
    """

    lengths: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    topology: Topology | None
    round_bytes: int = ROUND_BYTES
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def rank(self) -> int:
        """Return this data-parallel rank."""
        return 0 if self.topology is None else self.topology.data_rank

    def run(
        self, local: Mapping[str, Tensor], numbers: np.ndarray, columns: Columns, width: int, store: TensorStore
    ) -> BatchedDataDict:
        """Return the sequences that this rank receives, in the order of their numbers. Collective.

        Args:
            local: The sequences that this rank has. Only the first rank of a replica sends any.
            numbers: The numbers of the `local` sequences in the global batch, ascending.
            columns: The keys to move.
            width: The columns of the returned tensors.
            store: The storage of the returned tensors.
        """
        wanted = np.flatnonzero(self.targets == self.rank)
        tensors = {key: column.allocate(store, key, len(wanted), width) for key, column in columns.items()}
        rounds = self._plan_rounds(columns)
        for round_ in range(int(rounds.max()) + 1 if len(rounds) else 0):
            moving = np.flatnonzero(rounds == round_)
            sent = moving[self.sources[moving] == self.rank]
            sent = sent[np.argsort(self.targets[sent], kind="stable")]
            received = moving[self.targets[moving] == self.rank]
            received = received[np.argsort(self.sources[received], kind="stable")]
            payload = self._receive(local, numbers, columns, sent, received)
            indices = np.searchsorted(wanted, received)
            for key, values in self._split_by_key(payload, columns, received).items():
                self._write(tensors[key], values, columns[key], received, indices)
        return BatchedDataDict(tensors)

    def _plan_rounds(self, columns: Columns) -> np.ndarray:
        """Return the round in which each sequence moves, [B], the same on every rank."""
        token_bytes = sum(column.bytes for column in columns.values() if column.per_token)
        sequence_bytes = sum(column.bytes for column in columns.values() if not column.per_token)
        order = np.argsort(self.sources, kind="stable")
        sizes = self.lengths[order].astype(np.int64) * token_bytes + sequence_bytes
        offsets = np.cumsum(sizes) - sizes
        sources = self.sources[order]
        starts = np.flatnonzero(np.r_[True, sources[1:] != sources[:-1]]) if len(order) else np.zeros(0, dtype=int)
        offsets -= np.repeat(offsets[starts], np.diff(np.r_[starts, len(order)]))
        rounds = np.empty(len(order), dtype=np.int64)
        rounds[order] = offsets // self.round_bytes
        return rounds

    def _receive(
        self,
        local: Mapping[str, Tensor],
        numbers: np.ndarray,
        columns: Columns,
        sent: np.ndarray,
        received: np.ndarray,
    ) -> Tensor:
        """Send the sequences `sent`, and return the bytes of the sequences `received`.

        The bytes are ordered by source, and within a source by key.
        """
        topology = self.topology
        into = self._count_bytes(columns, received, self.sources)
        if topology is not None and not is_first_of_replica(topology):
            payload = torch.empty(int(into.sum()), dtype=torch.uint8, device=topology.device)
            self.traffic.received += len(payload)
        else:
            payload = self._pack(local, numbers, columns, sent)
            if topology is not None and topology.data > 1:
                out = self._count_bytes(columns, sent, self.targets)
                payload = self._exchange_with_replicas(payload, out, into, topology)
        if topology is None or topology.world_size == topology.data:
            return payload.cpu()
        return broadcast_in_replica(payload.to(topology.device), topology).cpu()

    def _exchange_with_replicas(self, packed: Tensor, out: np.ndarray, into: np.ndarray, topology: Topology) -> Tensor:
        """Send `packed` to the first ranks of other replicas, and return the bytes that these send, by source.

        `packed` has the bytes for each target, one after the other. `out` [keys, ranks] is the number of bytes of each
        key for each target, and `into` the same from each source.
        """
        sizes_out, sizes_into = out.sum(0), into.sum(0)
        payload = torch.empty(int(sizes_into.sum()), dtype=torch.uint8, device=topology.device)
        dist.all_to_all_single(
            payload, packed.to(topology.device), sizes_into.tolist(), sizes_out.tolist(), group=topology.groups.dp
        )
        self.traffic.sent += int(sizes_out.sum() - sizes_out[self.rank])
        self.traffic.received += int(sizes_into.sum() - sizes_into[self.rank])
        return payload

    def _count_bytes(self, columns: Columns, chosen: np.ndarray, peers: np.ndarray) -> np.ndarray:
        """Return how many bytes each key has in the `chosen` sequences of each rank, [keys, ranks].

        `peers` [B] has the rank of each sequence.
        """
        num_ranks = 1 if self.topology is None else self.topology.data
        ranks = peers[chosen]
        numbers = np.bincount(ranks, minlength=num_ranks)
        tokens = np.bincount(ranks, weights=self.lengths[chosen], minlength=num_ranks).astype(np.int64)
        return np.array([(tokens if column.per_token else numbers) * column.bytes for column in columns.values()])

    def _pack(self, local: Mapping[str, Tensor], numbers: np.ndarray, columns: Columns, sent: np.ndarray) -> Tensor:
        """Return the bytes of the sequences `sent`, ordered by target, and within a target by key."""
        if not len(sent):
            return torch.empty(0, dtype=torch.uint8)
        indices = np.searchsorted(numbers, sent)
        payloads = [self._read_bytes(local[key], column, sent, indices) for key, column in columns.items()]
        sizes = self._count_bytes(columns, sent, self.targets)
        parts = [payload.split(key_sizes) for payload, key_sizes in zip(payloads, sizes.tolist(), strict=True)]
        return torch.cat([parts[key][target] for target in np.flatnonzero(sizes.any(0)) for key in range(len(parts))])

    def _split_by_key(self, payload: Tensor, columns: Columns, received: np.ndarray) -> dict[str, Tensor]:
        """Split the received bytes by key; those of a key are ordered by source."""
        sizes = self._count_bytes(columns, received, self.sources)
        sizes = sizes[:, sizes.any(0)]
        parts = payload.split(sizes.T.flatten().tolist())
        return {key: torch.cat(parts[number :: len(columns)]) for number, key in enumerate(columns) if len(received)}

    def _read_bytes(self, values: Tensor, column: Column, sent: np.ndarray, indices: np.ndarray) -> Tensor:
        """Return the bytes of a key's values for the sequences `sent`, one sequence after the other."""
        if column.per_token:
            flat = values.flatten(0, 1)[self._locate_tokens(sent, indices, values.size(1))]
        else:
            flat = values[torch.from_numpy(indices)]
        return flat.contiguous().view(-1).view(torch.uint8)

    def _write(self, into: Tensor, payload: Tensor, column: Column, received: np.ndarray, indices: np.ndarray) -> None:
        """Write the values of the received sequences into a tensor, at `indices`."""
        values = payload.view(column.dtype).view(-1, *column.shape)
        if column.per_token and len(received):
            into.flatten(0, 1)[self._locate_tokens(received, indices, into.size(1))] = values
        elif len(received):
            into[torch.from_numpy(indices)] = values

    def _locate_tokens(self, chosen: np.ndarray, indices: np.ndarray, width: int) -> Tensor:
        """Return the positions of the chosen sequences' tokens in a flattened tensor [·, width].

        Before it was flattened, the tensor had these sequences at `indices`.
        """
        counts = self.lengths[chosen].astype(np.int64)
        starts = indices * width - (np.cumsum(counts) - counts)
        return torch.from_numpy(np.repeat(starts, counts) + np.arange(int(counts.sum())))


def is_first_of_replica(topology: Topology) -> bool:
    """Return whether this is the rank that exchanges data for its data-parallel replica."""
    return topology.tensor_rank == topology.context_rank == topology.pipeline_rank == 0


def broadcast_in_replica(values: Tensor, topology: Topology) -> Tensor:
    """Return the values of the replica's first rank on all of its ranks. Collective within the replica.

    They are broadcast over the pipeline stages, then over context-parallel ranks, and then over tensor-parallel ranks.
    So every rank receives them once.
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

"""`Batch`: this rank's sequences of a global batch, and a few facts about all sequences of that batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.batching.exchange import (
    FILLS,
    Column,
    Columns,
    Exchange,
    Traffic,
    broadcast_in_replica,
    is_first_of_replica,
    read_columns,
)
from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.batching.microbatch import PADDING, StepPlan
from rl_megatron.batching.ownership import Ownership
from rl_megatron.batching.rank_plan import sequence_lengths
from rl_megatron.batching.shared_prefixes import NEIGHBOUR, PREFIX_SET, SHARED, SharedPrefixes, find_shared_prefixes
from rl_megatron.batching.trajectory_index import TRAJECTORY, TrajectoryIndex
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.token_keys import is_per_token
from rl_megatron.topology.collectives import gather_from_ranks
from rl_megatron.topology.ranks import Ranks
from rl_megatron.topology.reductions import ALONE, RankReduction

if TYPE_CHECKING:  # the topology imports megatron-core, which code that only shows a batch does not need
    from rl_megatron.topology.topology import Topology

LENGTHS, SAMPLED, DATA_SET = "input_lengths", "sampled_tokens", "data_set"
"""Facts: a sequence's length, its number of tokens in `token_mask`, and, if an algorithm reads it, the index of its
data set in `data.mix`.
"""

# The keys whose values every rank has for all sequences, if the batch has the key.
_FACTS = {
    LENGTHS: torch.int32,
    "rewards": torch.float32,
    "sample_mask": torch.bool,
    "stopped": torch.bool,
    TRAJECTORY: torch.int32,
    DATA_SET: torch.int32,
    NEIGHBOUR: torch.int32,
    SHARED: torch.int32,
}
_PADDING_VALUES = {"sample_mask": 0, "token_mask": 0, LENGTHS: 1}  # a padding sequence has one token


@dataclass
class Batch(MutableMapping[str, Any]):
    """A global batch, whose sequences are numbered from 0. As a mapping, it contains this rank's sequences.

    A batch is whole if this rank has all sequences: in a single process, or if all ranks were given the same batch.
    Otherwise a rank first has the sequences that it produced (see `gather_facts`). After they are moved to their
    owners, all ranks of a data-parallel replica have the sequences that this replica owns.

    Attributes:
        local: This rank's sequences in the order of their numbers.
        numbers: [n] int64. The numbers of `local`'s sequences in the global batch.
        facts: By name, the values [B] of all sequences of the global batch, the same on every rank.
        homes: [B] int16. The data-parallel rank on which each sequence was produced.
        width: The padded length of sequences, the same on every rank.
        columns: The keys that can be moved between ranks.
        padding: The values of a padding sequence: one token of zero loss weight. If empty, padding sequences repeat the
            step's first sequence.
        topology: The layout whose ranks share the batch; None if the batch is whole.
        owners: [B] int16. The data-parallel rank that owns each sequence; None before the move to owners.
        steps: The plans of this rank's optimizer steps, made together with `owners`; empty if they are made later.
        store: The storage of the tensors: host memory or files.
        traffic: The bytes that this rank has exchanged with others for the batch.
    """

    local: BatchedDataDict
    numbers: Tensor
    facts: dict[str, Tensor]
    homes: Tensor
    width: int
    columns: Columns = field(default_factory=dict)
    padding: dict[str, Any] = field(default_factory=dict)
    topology: Topology | None = None
    owners: Tensor | None = None
    steps: list[StepPlan] = field(default_factory=list)
    store: TensorStore = field(default_factory=TensorStore)
    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def from_whole(cls, values: Mapping[str, object]) -> Batch:
        """Return a whole batch from tensors [B, …] on the host and lists of B elements, the same on every rank.

        Raises the errors of `sequence_lengths`.
        """
        local = BatchedDataDict(values)
        size = local.size
        lengths = torch.tensor(sequence_lengths(local), dtype=torch.int32)
        local, prefixes = _take_prefixes(local, lengths)
        numeric = {key for key, value in local.items() if isinstance(value, Tensor) and value.dim() == 1}
        facts = _compute_facts(local, numeric | {"token_mask"} & local.keys()) | {LENGTHS: lengths} | prefixes
        batch = cls(local, torch.arange(size), facts, torch.zeros(size, dtype=torch.int16), local["input_ids"].size(1))
        return batch._renumber_trajectories(torch.zeros(1, dtype=torch.long))

    @classmethod
    def gather_facts(
        cls, local: BatchedDataDict | None, topology: Topology | None, store: TensorStore | None = None
    ) -> Batch:
        """Return one batch of the sequences that all ranks have produced, exchanging only facts. Collective.

        Its sequences are numbered in the order of the data-parallel ranks that produced them.

        Args:
            local: This rank's sequences as tensors, with `input_ids` and `input_lengths`; None if it has produced none.
                Only the first rank of a data-parallel replica may have any. All ranks' sequences have the same keys.
            topology: The layout; None in a single process.
            store: The storage of tensors after the move to owners. None: host memory.
        """
        traffic = Traffic()
        if topology is not None and topology.world_size == 1:
            topology = None
        local = None if local is None or local.size == 0 else local
        if local is not None and topology is not None and not is_first_of_replica(topology):
            raise ValueError("only the first rank of a data-parallel replica can produce sequences")
        counts, widths = _count_sequences(local, topology, traffic)
        producers = counts.nonzero().flatten()
        if not len(producers):
            raise ValueError("no rank has produced a sequence")
        if local is not None:
            local, prefixes = _take_prefixes(local, local[LENGTHS])
            local.update(prefixes)
        columns, padding = _share_columns(local, topology, int(producers[0]))
        facts = _gather_facts(local, columns, counts, topology, traffic)
        for values in (columns, padding, *([] if local is None else [local])):
            for key in (NEIGHBOUR, SHARED):
                values.pop(key, None)
        starts = counts.cumsum(0) - counts
        first, size = int(starts[0 if topology is None else topology.data_rank]), 0 if local is None else local.size
        batch = cls(
            local if local is not None else BatchedDataDict(), torch.arange(first, first + size), facts,
            torch.repeat_interleave(counts).to(torch.int16), int(widths.max()), columns, padding,
            topology, store=store or TensorStore(), traffic=traffic,
        )  # fmt: skip
        return batch._renumber_trajectories(starts[producers])

    def _renumber_trajectories(self, starts: Tensor) -> Batch:
        """Return the batch with trajectories numbered from 0 without a gap.

        A trajectory starts where the number changes, and at each sequence in `starts`.
        """
        if TRAJECTORY not in self.facts:
            return self
        numbers = self.facts[TRAJECTORY]
        changes = torch.ones_like(numbers)
        changes[1:] = (numbers.diff() != 0).to(numbers)
        changes[starts[starts < len(numbers)]] = 1
        numbers = changes.cumsum(0).to(numbers) - 1
        local = self.local
        if TRAJECTORY in local:
            local = BatchedDataDict(local)
            local[TRAJECTORY] = numbers[self.numbers].to(local[TRAJECTORY])
        return replace(self, local=local, facts=self.facts | {TRAJECTORY: numbers})

    def __getitem__(self, key: str) -> Any:
        """Return the values of this rank's sequences."""
        return self.local[key]

    def __setitem__(self, key: str, values: Tensor) -> None:
        """Add values of this rank's sequences, [n, …]."""
        if len(values) != len(self.numbers):
            raise ValueError(f"key {key!r} has {len(values)} values, but this rank has {len(self.numbers)} sequences")
        self.local[key] = self.store.keep(values)

    def __delitem__(self, key: str) -> None:
        del self.local[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.local)

    def __len__(self) -> int:
        return len(self.local)

    def __contains__(self, key: object) -> bool:
        return key in self.local

    @property
    def size(self) -> int:
        """Return the number of sequences of the global batch."""
        return len(self.facts[LENGTHS])

    @property
    def lengths(self) -> Tensor:
        """Return the number of tokens of each sequence of the global batch, int32."""
        return self.facts[LENGTHS]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the global batch, without padding."""
        return int(self.facts[LENGTHS].sum(dtype=torch.int64))

    @property
    def is_whole(self) -> bool:
        """Return whether this rank has all sequences."""
        return self.topology is None

    @property
    def ranks(self) -> RankReduction:
        """Return the data-parallel ranks that share the batch: this rank alone if the batch is whole."""
        return ALONE if self.topology is None else RankReduction(self.topology.groups.dp, self.topology.device)

    @property
    def all_ranks(self) -> Ranks:
        """Return all ranks that share the batch: this rank alone if the batch is whole."""
        return Ranks() if self.topology is None else self.topology.ranks

    @cached_property
    def trajectories(self) -> TrajectoryIndex:
        """Return the trajectories of the global batch's sequences."""
        return TrajectoryIndex(self.facts)

    @cached_property
    def prefixes(self) -> SharedPrefixes | None:
        """Return what the global batch's sequences have in common; None if nothing is known."""
        return SharedPrefixes(self.facts) if SHARED in self.facts else None

    def select_local(self, values: Tensor) -> Tensor:
        """Return this rank's part [n, …] of values [B, …] of the global batch."""
        return values[self.numbers]

    def slice(self, start: int, stop: int) -> BatchedDataDict:
        """Return views of this rank's sequences whose numbers are from `start` to `stop - 1`."""
        first, last = torch.searchsorted(self.numbers, torch.tensor([start, stop])).tolist()
        return self.local.slice(first, last)

    def select(self, chosen: Tensor) -> Batch:
        """Return the batch of the chosen sequences only; `chosen` is [B] bool, the same on every rank.

        The sequences keep their owners. A rank may be left without sequences.
        """
        is_local = chosen[self.numbers]
        numbers = (chosen.cumsum(0) - 1)[self.numbers[is_local]]
        local = self.local.select_indices(is_local) if len(self.local) else self.local
        facts = {name: values[chosen] for name, values in self.facts.items()}
        if self.prefixes is not None:
            facts |= self.prefixes.select(chosen.numpy())
        owners, traffic = (None, Traffic()) if self.owners is None else (self.owners[chosen], self.traffic)
        selected = replace(
            self, local=local, numbers=numbers, facts=facts, homes=self.homes[chosen], owners=owners, steps=[],
            traffic=traffic,
        )  # fmt: skip
        return selected._renumber_trajectories(numbers[:0])

    @classmethod
    def join(cls, parts: Sequence[Batch]) -> Batch:
        """Join batches into one, in order. Their sequences must not have been moved to their owners."""
        first = parts[0]
        if len(parts) == 1:
            return first
        sizes = torch.tensor([part.size for part in parts])
        starts = sizes.cumsum(0) - sizes
        local = [part.local for part in parts if len(part.numbers)]
        joined = replace(
            first,
            local=BatchedDataDict.from_batches(local, FILLS) if local else first.local,
            numbers=torch.cat([part.numbers + start for part, start in zip(parts, starts, strict=True)]),
            facts={name: torch.cat([part.facts[name] for part in parts]) for name in first.facts},
            homes=torch.cat([part.homes for part in parts]),
            width=max(part.width for part in parts),
            steps=[],
            traffic=Traffic(),
        )
        return joined._renumber_trajectories(starts)

    def keep_all(self) -> Batch:
        """Return this whole batch with its tensors in the batch's store and this rank as the owner of all sequences."""
        local = self.local.map_values(self.store.keep, list)
        return replace(self, local=local, owners=torch.zeros(self.size, dtype=torch.int16))

    def move_to_owners(self, ownership: Ownership) -> Batch:
        """Return the batch with every sequence on its owner. Collective. Every sequence is moved at most once."""
        assert self.topology is not None  # a whole batch has nothing to move
        owners = torch.from_numpy(ownership.owners.astype("int16"))
        local = self._exchange(self.homes, owners, self.local, self.numbers, self.columns, self.store)
        numbers = (owners == self.topology.data_rank).nonzero().flatten()
        return replace(self, local=local, numbers=numbers, owners=owners, steps=ownership.steps)

    def gather_at_homes(self, keys: Sequence[str]) -> BatchedDataDict:
        """Return these keys of the sequences that this rank has produced, in the order of their numbers. Collective.

        All ranks of a data-parallel replica get what its first rank has produced. A whole batch returns all sequences.
        """
        return self._send_to(self.homes, keys)

    def gather_on_rank_0(self, keys: Sequence[str]) -> BatchedDataDict:
        """Return these keys of all sequences on the ranks of the first replica. Collective.

        Other ranks get empty tensors. A whole batch returns all sequences on every rank.
        """
        return self._send_to(torch.zeros_like(self.homes), keys)

    def scatter_from_rank_0(self, key: str, values: BatchedDataDict) -> Tensor:
        """Return `values[key]`, [n, width] fp32, of this rank's sequences. Collective.

        On the ranks of the first replica, `values` has all sequences. On other ranks, it may be empty.
        """
        if self.owners is None or self.topology is None:
            return values[key]
        columns = {key: Column(torch.float32, (), per_token=True)}
        numbers = torch.arange(len(values.get(key, ())))
        return self._exchange(torch.zeros_like(self.homes), self.owners, values, numbers, columns, TensorStore())[key]

    def _send_to(self, targets: Tensor, keys: Sequence[str]) -> BatchedDataDict:
        """Return these keys of the sequences that `targets` assigns to this rank; the owners send them. Collective."""
        values = BatchedDataDict({key: self.local[key] for key in keys})
        if self.owners is None or self.topology is None:
            return values
        columns = read_columns(self.local)
        columns = {key: columns[key] for key in keys}
        return self._exchange(self.owners, targets, values, self.numbers, columns, TensorStore())

    def _exchange(
        self, sources: Tensor, targets: Tensor, local: BatchedDataDict, numbers: Tensor, columns: Columns,
        store: TensorStore,
    ) -> BatchedDataDict:  # fmt: skip
        lengths = self.lengths.numpy()
        exchange = Exchange(lengths, sources.numpy(), targets.numpy(), self.topology, traffic=self.traffic)
        return exchange.run(local, numbers.numpy(), columns, self.width, store)

    def take_sequences(self, chosen: Sequence[int], width: int | None, first: int = 0) -> BatchedDataDict:
        """Return copies of some of this rank's sequences.

        Args:
            chosen: Sequence numbers in the global batch, and `PADDING` for each padding sequence, which has zero loss
                weight.
            width: The number of columns to return of per-token tensors. None: all.
            first: The number of the sequence that padding sequences repeat if the batch has no `padding`.
        """
        numbers = torch.tensor(chosen)
        is_real = numbers != PADDING
        indices = torch.searchsorted(self.numbers, numbers[is_real])
        sequences = BatchedDataDict()
        for key, values in self.local.items():
            if isinstance(values, list):  # only whole batches have lists
                sequences[key] = [values[first if number == PADDING else number] for number in chosen]
                continue
            cut = values if width is None or not is_per_token(key, values, self.width) else values[:, :width]
            sequences[key] = cut[indices]
            if len(indices) < len(chosen):
                sequences[key] = self._insert_padding(key, sequences[key], is_real, cut[first : first + 1])
        return sequences

    def _insert_padding(self, key: str, real: Tensor, is_real: Tensor, first: Tensor) -> Tensor:
        """Return the values `real` where `is_real` is set, and those of padding sequences elsewhere."""
        values = real.new_full((len(is_real), *real.shape[1:]), FILLS.get(key, 0))
        values[is_real] = real
        padding = self.padding.get(key)
        if self.padding and padding is None:
            return values
        if padding is None:
            padding = torch.full_like(first, _PADDING_VALUES[key]) if key in _PADDING_VALUES else first
        if padding.dim() > 1 and padding.size(1) == 1:
            values[~is_real, :1] = padding
        else:
            values[~is_real] = padding
        return values


def _take_prefixes(local: BatchedDataDict, lengths: Tensor) -> tuple[BatchedDataDict, dict[str, Tensor]]:
    """Return the sequences without `PREFIX_SET`, and what `find_shared_prefixes` returns; {} without that key."""
    if PREFIX_SET not in local:
        return local, {}
    prefixes = find_shared_prefixes(local, lengths.tolist())
    return BatchedDataDict({key: value for key, value in local.items() if key != PREFIX_SET}), prefixes


def _count_sequences(
    local: BatchedDataDict | None, topology: Topology | None, traffic: Traffic
) -> tuple[Tensor, Tensor]:
    """Return the number of sequences that each data-parallel rank has produced, and their padded length."""
    count = torch.tensor([0, 0] if local is None else [local.size, local["input_ids"].size(1)])
    if topology is None:
        return count[:1], count[1:]
    counts = _gather_from_replicas(count.to(topology.device), topology)
    traffic.received += counts.nbytes
    return counts[:, 0], counts[:, 1]


def _gather_from_replicas(values: Tensor, topology: Topology) -> Tensor:
    """Return the values [ranks, …] of the first ranks of all replicas, on the host."""
    if is_first_of_replica(topology):
        gathered = gather_from_ranks(values, topology.groups.dp).contiguous()
    else:
        gathered = values.new_empty(topology.data, *values.shape)
    return broadcast_in_replica(gathered, topology).cpu()


def _share_columns(
    local: BatchedDataDict | None, topology: Topology | None, producer: int
) -> tuple[Columns, dict[str, Tensor]]:
    """Return (columns, values of padding sequences) of the data-parallel rank `producer`, on every rank. Collective."""
    shared: list[Any] = [None]
    if local is not None and (topology is None or topology.data_rank == producer):
        columns = read_columns(local)
        first = {key: value[:1, :1] if columns[key].per_token else value[:1] for key, value in local.items()}
        padding = {key: value.clone() for key, value in first.items()}
        for key in _PADDING_VALUES.keys() & padding.keys():
            padding[key].fill_(_PADDING_VALUES[key])
        shared = [(columns, padding)]
    if topology is not None:
        groups = topology.groups
        if is_first_of_replica(topology) and topology.data > 1:
            dist.broadcast_object_list(shared, dist.get_global_rank(groups.dp, producer), groups.dp, topology.device)
        for group in (groups.pp, groups.cp, groups.tp):
            if group.size() > 1:
                dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group, topology.device)
    return shared[0]


def _gather_facts(
    local: BatchedDataDict | None, columns: Columns, counts: Tensor, topology: Topology | None, traffic: Traffic
) -> dict[str, Tensor]:
    """Return the facts of all sequences on every rank. Collective."""
    if topology is None:
        assert local is not None  # a single process has produced all sequences
        return _compute_facts(local, columns)
    dtypes, most = _fact_types(columns), int(counts.max())
    packed = torch.zeros(
        most * sum(dtype.itemsize for dtype in dtypes.values()), dtype=torch.uint8, device=topology.device
    )
    if local is not None:
        facts = torch.cat([values.view(torch.uint8) for values in _compute_facts(local, columns).values()])
        packed[: len(facts)] = facts.to(topology.device)
    producers = counts.nonzero().flatten()
    if len(producers) == 1:
        if topology.data > 1 and is_first_of_replica(topology):
            producer = dist.get_global_rank(topology.groups.dp, int(producers[0]))
            dist.broadcast(packed, producer, topology.groups.dp)
        parts = broadcast_in_replica(packed, topology).cpu()[None]
    else:
        parts = _gather_from_replicas(packed, topology)
        parts = parts if len(producers) == len(parts) else parts[producers]
    traffic.received += parts.numel()
    return _unpack(parts, counts[producers], dtypes)


def _unpack(parts: Tensor, counts: Tensor, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the facts of all sequences from the bytes [ranks, …] that the ranks with sequences have packed."""
    facts, starts, are_equal = {}, torch.zeros_like(counts), bool((counts == counts[0]).all())
    for name, dtype in dtypes.items():
        ends = starts + counts * dtype.itemsize
        if are_equal:
            part = parts[:, starts[0] : ends[0]].contiguous()
        else:
            part = torch.cat([packed[a:b] for packed, a, b in zip(parts, starts, ends, strict=True)])
        facts[name], starts = part.view(-1).view(dtype), ends
    return facts


def _fact_types(keys: Collection[str]) -> dict[str, torch.dtype]:
    """Return the dtypes of the facts of a batch with these keys, the largest first, so that each fact is aligned."""
    dtypes = {name: dtype for name, dtype in _FACTS.items() if name in keys}
    if "token_mask" in keys:
        dtypes[SAMPLED] = torch.int32
    return dict(sorted(dtypes.items(), key=lambda fact: -fact[1].itemsize))


def _compute_facts(local: BatchedDataDict, keys: Collection[str]) -> dict[str, Tensor]:
    """Return, for this rank's sequences, the facts that a batch with these keys has."""
    return {
        name: ((local["token_mask"] != 0).sum(1) if name == SAMPLED else local[name]).to(dtype).contiguous()
        for name, dtype in _fact_types(keys).items()
    }

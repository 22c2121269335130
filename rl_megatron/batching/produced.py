"""Turn sequences into a `ShardedBatch`, wherever they were produced: on one rank, or some on every replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.batching.exchange import Columns, Moved, columns_of, from_first_of_replica, is_first_of_replica
from rl_megatron.batching.host_memory import TensorStore
from rl_megatron.batching.sharded import DATA_SET, LENGTHS, SAMPLED, TRAJECTORIES, ShardedBatch
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology.collectives import from_all_ranks
from rl_megatron.topology.topology import Topology

# What every rank knows of every sequence, if the batch has it.
_FACTS = {
    LENGTHS: torch.int32,
    "rewards": torch.float32,
    "sample_mask": torch.bool,
    "stopped": torch.bool,
    TRAJECTORIES: torch.int32,
    DATA_SET: torch.int32,
}


def produced(own: BatchedDataDict | None, topology: Topology | None, store: TensorStore | None = None) -> ShardedBatch:
    """Return the sequences that ranks have produced as one batch. Collective. Nothing but numbers is moved.

    The global batch has those of the first data-parallel rank first, and then those of the next.

    Args:
        own: The sequences of this rank, with `input_ids` and `input_lengths`; None if it has produced none. Only the
            first rank of a data-parallel replica may have produced any. All batches have the same keys.
        topology: The layout; None in a single process.
        store: Where tensors are kept once they were moved. None: in host memory.

    Raises:
        ValueError: No rank has produced a sequence, or a rank has that is not the first of its replica.
        TypeError: A value of the batch is not a tensor.
    """
    moved = Moved()
    if topology is not None and topology.world_size == 1:
        topology = None
    own = None if own is None or own.size == 0 else own
    if own is not None and topology is not None and not is_first_of_replica(topology):
        raise ValueError("only the first rank of a data-parallel replica can produce sequences")
    counts, widths = _counts(own, topology, moved)
    producers = np.flatnonzero(counts)
    if not len(producers):
        raise ValueError("no rank has produced a sequence")
    columns, padding = _described(own, topology, int(producers[0]))
    facts = _gathered(own, columns, counts, topology, moved)
    if TRAJECTORIES in facts:
        facts[TRAJECTORIES] = _numbered(facts[TRAJECTORIES], counts)
    homes = np.repeat(np.arange(len(counts), dtype=np.uint16), counts)
    before = 0 if topology is None else int(counts[: topology.data_rank].sum())
    numbers = np.arange(before, before + (0 if own is None else own.size))
    width = int(widths.max())
    batch = ShardedBatch(
        own if own is not None else BatchedDataDict(), numbers, facts, homes, width, columns, padding, topology,
        store=store or TensorStore(), moved=moved,
    )  # fmt: skip
    if own is not None and TRAJECTORIES in own:
        batch.own = BatchedDataDict(own)
        batch.own[TRAJECTORIES] = batch.own_facts(facts[TRAJECTORIES]).to(own[TRAJECTORIES])
    return batch


def whole(batch: Mapping[str, Any]) -> ShardedBatch:
    """Return a batch that this process has whole as a sharded batch of a single process."""
    return produced(BatchedDataDict(batch), None)


def _counts(own: BatchedDataDict | None, topology: Topology | None, moved: Moved) -> tuple[np.ndarray, np.ndarray]:
    """Return how many sequences each data-parallel rank has produced, and their columns."""
    here = [0, 0] if own is None else [own.size, own["input_ids"].size(1)]
    if topology is None:
        return np.array(here[:1]), np.array(here[1:])
    found = _of_all_replicas(torch.tensor(here, device=topology.device), topology)
    moved.received += found.nbytes
    return found[:, 0].numpy(), found[:, 1].numpy()


def _of_all_replicas(values: Tensor, topology: Topology) -> Tensor:
    """Return the values [ranks, …] of the first ranks of all replicas, on the host."""
    if is_first_of_replica(topology):
        every = from_all_ranks(values, topology.groups.dp).contiguous()
    else:
        every = values.new_empty(topology.data, *values.shape)
    return from_first_of_replica(every, topology).cpu()


def _described(
    own: BatchedDataDict | None, topology: Topology | None, producer: int
) -> tuple[Columns, dict[str, Tensor]]:
    """Return the columns and the values of padding sequences, as the first producer has them."""
    described: list[Any] = [None]
    if own is not None and (topology is None or topology.data_rank == producer):
        columns = columns_of(own)
        first = {key: value[:1, :1] if columns[key].per_token else value[:1] for key, value in own.items()}
        padding = {key: value.clone() for key, value in first.items()}
        for key in ("sample_mask", "token_mask"):
            if key in padding:
                padding[key].zero_()
        padding[LENGTHS].fill_(1)
        described = [(columns, padding)]
    if topology is not None:
        groups = topology.groups
        if is_first_of_replica(topology) and topology.data > 1:
            dist.broadcast_object_list(described, dist.get_global_rank(groups.dp, producer), groups.dp, topology.device)
        for group in (groups.pp, groups.cp, groups.tp):
            if group.size() > 1:
                dist.broadcast_object_list(described, dist.get_global_rank(group, 0), group, topology.device)
    return described[0]


def _gathered(
    own: BatchedDataDict | None, columns: Columns, counts: np.ndarray, topology: Topology | None, moved: Moved
) -> dict[str, Tensor]:
    """Return the facts of all sequences on every rank."""
    dtypes = {name: dtype for name, dtype in _FACTS.items() if name in columns}
    if "token_mask" in columns:
        dtypes[SAMPLED] = torch.int32
    dtypes = dict(sorted(dtypes.items(), key=lambda each: -each[1].itemsize))  # so that each begins at its multiple
    if topology is None:
        assert own is not None  # a single process has produced all sequences
        return _facts(own, dtypes)
    bytes_each, most = sum(dtype.itemsize for dtype in dtypes.values()), int(counts.max())
    packed = torch.zeros(most * bytes_each, dtype=torch.uint8, device=topology.device)
    if own is not None:
        here = torch.cat([values.view(torch.uint8) for values in _facts(own, dtypes).values()])
        packed[: len(here)] = here.to(topology.device)
    producers = np.flatnonzero(counts)
    if len(producers) == 1:
        if topology.data > 1 and is_first_of_replica(topology):
            producer = dist.get_global_rank(topology.groups.dp, int(producers[0]))
            dist.broadcast(packed, producer, topology.groups.dp)
        parts = from_first_of_replica(packed, topology).cpu()[None]
    else:
        parts = _of_all_replicas(packed, topology)
        parts = parts if len(producers) == len(parts) else parts[torch.from_numpy(producers)]
    moved.received += parts.numel()
    return _unpacked(parts, counts[producers], dtypes)


def _unpacked(parts: Tensor, counts: np.ndarray, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the facts of all sequences, from the bytes [ranks, …] that each of some ranks has packed."""
    found, starts = {}, np.zeros(len(counts), dtype=np.int64)
    for name, dtype in dtypes.items():
        sizes = counts * dtype.itemsize
        if (sizes == sizes[0]).all():
            part = parts[:, starts[0] : starts[0] + sizes[0]].contiguous()
        else:
            part = torch.cat([each[a : a + size] for each, a, size in zip(parts, starts, sizes, strict=True)])
        found[name] = part.view(-1).view(dtype)
        starts += sizes
    return found


def _facts(own: BatchedDataDict, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the facts of this rank's sequences, in the order of `dtypes`."""
    sampled = (own["token_mask"] != 0).sum(1) if SAMPLED in dtypes else None
    return {
        name: (own[name] if sampled is None or name != SAMPLED else sampled).to(dtype).contiguous()
        for name, dtype in dtypes.items()
    }


def _numbered(numbers: Tensor, counts: np.ndarray) -> Tensor:
    """Return trajectories' numbers from 0 over all ranks, from those of each rank."""
    changes = torch.ones_like(numbers)
    changes[1:] = (numbers.diff() != 0).to(numbers)
    starts = (np.cumsum(counts) - counts)[counts > 0]
    changes[torch.from_numpy(starts)] = 1
    return changes.cumsum(0).to(numbers) - 1

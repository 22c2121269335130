"""Batches of which every data-parallel rank has the sequences that it learns from, and no rank has the others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_megatron.algorithms.loop import Loop
from rl_megatron.batching.batch import Batch
from rl_megatron.batching.exchange import is_first_of_replica
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.loader import DataLoader
from rl_megatron.timing import phase


def owned_batches(stage: Loop, loader: DataLoader[BatchedDataDict]) -> Iterator[tuple[int, Batch]]:
    """Yield each step of a stage with its batch, as `Loop.batches` does, but with sequences that have owners.

    Each data-parallel replica reads an equal part of the batch, and the parts are balanced then. Collective.

    Args:
        stage: The stage.
        loader: The loader of its training data.
    """
    stage.use_loader(loader)
    topology = stage.policy.topology
    for step in stage.steps():
        part = loader.part(stage.batch_number(step) - 1, topology.data_rank, topology.data)
        batch = Batch.gather_facts(part if is_first_of_replica(topology) else None, topology)
        size = loader.group_size
        together = None if size == 1 else torch.arange(batch.size) // size
        yield step, owned(batch, stage, together)


def owned(batch: Batch, stage: Loop, together: Tensor | None) -> Batch:
    """Return a batch with every sequence on the data-parallel rank that learns from it. Collective.

    Args:
        batch: The sequences on the ranks that have produced them.
        stage: The stage, whose optimizer steps are spread evenly over the ranks.
        together: [B] A number for each sequence, equal for neighbours that one rank must own. None: ranks own any.
    """
    if batch.is_whole:
        return batch.keep_all()
    sizes = batch.trajectories.step_sizes(stage.config.train.global_batch_size)
    with phase("exchange"):
        return stage.policy.distribute(batch, sizes, together)

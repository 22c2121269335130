"""What a policy does with batches: plan each optimizer step of a whole batch, or of one whose sequences have owners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.owned_plan import owned_microbatches, part_of, plan_owned
from rl_megatron.batching.ownership import OwnershipPlanner, default_blocks, plan_ownership
from rl_megatron.batching.rank_plan import RankPlan, plan_global_batch, required
from rl_megatron.batching.routing import ROUTED_EXPERTS
from rl_megatron.batching.sharded import ShardedBatch, reduction_over
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution import Denominators
from rl_megatron.losses.contract import CountOfSequences
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.policy.inference import check_width, checked_lengths, on_host, replayable
from rl_megatron.policy.interfaces import Batch, BatchT
from rl_megatron.topology.reductions import RankReduction


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step on this rank.

    Attributes:
        plan: The microbatches of this rank.
        denominators: The counts of the step's global batch.
    """

    plan: RankPlan
    denominators: Denominators


@dataclass(frozen=True)
class StepPlanner:
    """Plans the optimizer steps of batches for a model.

    Attributes:
        model: The model.
        cost: The cost of a sequence.
    """

    model: ShardedModel
    cost: SequenceCost

    def steps(
        self,
        data: Batch,
        batching: Batching,
        group_size: int,
        gbs: int,
        sizes: Sequence[int] | None,
        counts_of: Mapping[str, CountOfSequences] = MappingProxyType({}),
    ) -> Iterator[PlannedStep]:
        """Return an iterator over the optimizer steps of a batch, each planned when it is taken.

        It is collective for a sharded batch.

        Args:
            data: The batch.
            batching: How sequences form microbatches.
            group_size: Sequences that the loss needs together.
            gbs: The sequences of a step; the last step may have fewer.
            sizes: The sequences of each step, instead of `gbs`.
            counts_of: What the loss counts over the global batch of a step: `Loss.global_counts`.
        """
        prepared, lengths = self._prepared(data), []
        if isinstance(prepared, BatchedDataDict):
            lengths = checked_lengths(self.model, prepared)
            for key in ("token_mask", "sample_mask"):
                required(prepared, key)
        ends = list(accumulate(sizes)) if sizes else [*range(gbs, data.size, gbs), data.size]
        if isinstance(prepared, ShardedBatch):
            return (self._of_owned(prepared, *part, batching, group_size, counts_of) for part in pairwise([0, *ends]))
        return (
            self.of_whole(
                _with_counts(prepared.slice(start, stop), counts_of), lengths[start:stop], batching, group_size
            )
            for start, stop in pairwise([0, *ends])
        )

    def of_whole(self, batch: BatchedDataDict, lengths: list[int], batching: Batching, group_size: int) -> PlannedStep:
        """Return this rank's part of a step whose global batch every rank has."""
        topology = self.model.topology
        planned = plan_global_batch(batch, lengths, batching, topology, group_size, self.cost)
        return PlannedStep(planned.of_rank(topology.data_rank), Denominators.count(batch))

    def _of_owned(
        self,
        batch: ShardedBatch,
        start: int,
        stop: int,
        batching: Batching,
        group_size: int,
        counts_of: Mapping[str, CountOfSequences],
    ) -> PlannedStep:
        step = plan_owned(batch, start, stop, batching, self.model.topology, group_size, self.cost)
        part = part_of(batch, start, stop)
        if counts_of:
            batch = replace(batch, own=_with_counts(batch.own, counts_of, part, batch.ranks))
        return PlannedStep(owned_microbatches(batch, step), Denominators.count_over(batch.ranks, part))

    def distributed(
        self, batch: ShardedBatch, batching: Batching, sizes: Sequence[int], groups: Tensor | None
    ) -> ShardedBatch:
        """Return the batch with every sequence on the rank that trains on it; see `MegatronPolicy.distribute`."""
        topology = self.model.topology
        blocks, of_groups = default_blocks(topology.data), None if groups is None else groups.numpy()
        planner = OwnershipPlanner(
            batch.lengths, batch.width, batching, topology, self.cost, blocks, group_size=1, groups=of_groups
        )
        ranks = reduction_over(topology)
        return batch.moved_to(plan_ownership(planner, sizes, batch.homes, topology.data_rank, ranks))

    def _prepared(self, data: Batch) -> Batch:
        """Return the batch on the host, with its recorded experts if the model replays them."""
        if isinstance(data, ShardedBatch):
            check_width(self.model.config, data.width)
            return prepared_to_replay(self.model, data)
        return replayable(self.model, on_host(data))


def _with_counts(
    batch: BatchedDataDict,
    counts_of: Mapping[str, CountOfSequences],
    part: BatchedDataDict | None = None,
    ranks: RankReduction | None = None,
) -> BatchedDataDict:
    """Return a batch with counts over a global batch, repeated per sequence. Collective.

    Args:
        batch: The batch.
        counts_of: Key → what counts the sequences.
        part: The sequences of the batch that belong to the global batch; None for all.
        ranks: The ranks that have its other sequences; None if there are none.
    """
    if not counts_of:
        return batch
    own = torch.stack([count(batch if part is None else part).double().sum() for count in counts_of.values()])
    sums = (own if ranks is None else ranks.sum(own)).float()
    repeated = {key: value.expand(batch.size) for key, value in zip(counts_of, sums, strict=True)}
    return BatchedDataDict({**batch, **repeated})


def prepared_to_replay(model: ShardedModel, batch: ShardedBatch) -> ShardedBatch:
    """Return the batch with its recorded experts if the model replays them, and without them otherwise. Collective.

    Raises:
        ConfigError: The recorded experts of a rank do not fit; raised on every rank.
    """
    if ROUTED_EXPERTS not in batch:
        return batch
    return replace(batch, own=model.topology.ranks.all_or_none(lambda: replayable(model, batch.own)))


def result_of(data: BatchT, **values: Tensor) -> BatchT:
    """Return values of the sequences of a batch as a batch of the same kind."""
    if isinstance(data, ShardedBatch):
        return replace(data, own=BatchedDataDict(values))
    return BatchedDataDict(values)  # pyright: ignore[reportReturnType]  # it is a batch of the core's class

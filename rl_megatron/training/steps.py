"""Plan the optimizer steps of a batch: of a whole one, which every rank has, or of one whose sequences have owners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rl_megatron.batching.config import Batching, require_count
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.owned_plan import owned_microbatches, part_of, plan_owned
from rl_megatron.batching.ownership import OwnershipPlanner, default_blocks, plan_ownership
from rl_megatron.batching.rank_plan import RankPlan, plan_global_batch, required
from rl_megatron.batching.routing import ROUTED_EXPERTS
from rl_megatron.batching.sharded import ShardedBatch, reduction_over
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.token_keys import declare_token_keys
from rl_megatron.losses.base import Loss
from rl_megatron.losses.contract import CountOfSequences
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.policy.interfaces import Batch
from rl_megatron.topology.reductions import RankReduction
from rl_megatron.training.inference import check_width, checked_lengths, on_host, replayable
from rl_megatron.training.metrics import Denominators
from rl_megatron.training.teacher import Teacher


@dataclass(frozen=True)
class PlannedStep:
    """One optimizer step on this rank: its microbatches, and the counts of the step's global batch."""

    plan: RankPlan
    denominators: Denominators


@dataclass(frozen=True)
class StepPlanner:
    """Plans the optimizer steps of batches for a model."""

    model: ShardedModel
    cost: SequenceCost

    def plan_steps(
        self,
        data: Batch,
        loss: Loss,
        batching: Batching,
        gbs: int,
        sizes: Sequence[int] | None = None,
        teacher: Teacher | None = None,
        on_policy: bool = True,
    ) -> Iterator[PlannedStep]:
        """Check a batch, and return an iterator over its optimizer steps, each planned when it is taken.

        It is collective for a sharded batch. The arguments and the errors are those of `MegatronPolicy.train`.
        """
        declare_token_keys(*loss.next_token_keys)
        if sizes is not None:
            for number, size in enumerate(sizes):
                require_count(f"sizes[{number}]", size)
            if sum(sizes) != data.size:
                raise ValueError(f"sizes {list(sizes)} must add up to the batch, which has {data.size} sequences")
        _require_logprobs(data, loss, on_policy, -(-data.size // gbs) if sizes is None else len(sizes))
        per_microbatch = {"mbs": batching.sequences} if batching.kind == "padded" else {}
        _require_whole_groups(loss, {"the batch": data.size, "gbs": gbs, **per_microbatch})
        counts_of = {key: count for key, count in loss.global_counts.items() if key not in data}

        parts = pairwise([0, *(accumulate(sizes) if sizes else [*range(gbs, data.size, gbs), data.size])])
        if isinstance(data, ShardedBatch):
            owned = self._prepare_owned(data)
            steps = (self._plan_owned(owned, *part, batching, loss.group_size, counts_of) for part in parts)
        else:
            whole = replayable(self.model, on_host(data))
            lengths = checked_lengths(self.model, whole)
            for key in ("token_mask", "sample_mask"):
                required(whole, key)
            steps = (
                self._plan_whole(whole.slice(start, stop), lengths[start:stop], batching, loss.group_size, counts_of)
                for start, stop in parts
            )
        if teacher is None:
            return steps
        return (replace(step, plan=teacher.attach_logits(step.plan)) for step in steps)

    def _plan_whole(
        self,
        batch: BatchedDataDict,
        lengths: list[int],
        batching: Batching,
        group_size: int,
        counts_of: Mapping[str, CountOfSequences],
    ) -> PlannedStep:
        """Return this rank's part of a step whose global batch every rank has."""
        topology, batch = self.model.topology, _with_counts(batch, counts_of)
        planned = plan_global_batch(batch, lengths, batching, topology, group_size, self.cost)
        return PlannedStep(planned.of_rank(topology.data_rank), Denominators.count(batch))

    def _plan_owned(
        self,
        batch: ShardedBatch,
        start: int,
        stop: int,
        batching: Batching,
        group_size: int,
        counts_of: Mapping[str, CountOfSequences],
    ) -> PlannedStep:
        """Return this rank's part of a step whose sequences, from `start` to `stop`, have owners. Collective."""
        step = plan_owned(batch, start, stop, batching, self.model.topology, group_size, self.cost)
        part = part_of(batch, start, stop)
        if counts_of:
            batch = replace(batch, own=_with_counts(batch.own, counts_of, part, batch.ranks))
        return PlannedStep(owned_microbatches(batch, step), Denominators.count_over(batch.ranks, part))

    def _prepare_owned(self, batch: ShardedBatch) -> ShardedBatch:
        """Return a batch with recorded experts if the model replays them, and without them otherwise. Collective."""
        check_width(self.model.config, batch.width)
        if ROUTED_EXPERTS not in batch:
            return batch
        return replace(batch, own=self.model.topology.ranks.all_or_none(lambda: replayable(self.model, batch.own)))

    def distribute(
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


def _require_logprobs(data: Batch, loss: Loss, on_policy: bool, steps: int) -> None:
    """Refuse a batch without the logprobs of before the first step that the loss reads, unless it may do without."""
    missing = ", ".join(repr(key) for key in sorted(loss.on_policy_keys) if key not in data)
    if not missing or not loss.reads_on_policy_keys:
        return
    compute = "compute it with policy.get_logprobs(batch)['logprobs'] before the first step"
    if not on_policy:
        raise ValueError(
            f"{loss.display_name} needs {missing}, which the batch does not have: {compute}, or pass on_policy=True if "
            "this is the first step since the policy sampled the batch"
        )
    if steps > 1:
        raise ValueError(
            f"{loss.display_name} needs {missing} for {steps} optimizer steps, of which only the first one is "
            f"on-policy: {compute}"
        )


def _require_whole_groups(loss: Loss, counts: Mapping[str, int]) -> None:
    """Refuse sizes, by name, that would separate sequences that the loss needs together, such as preference pairs."""
    for name, count in counts.items():
        if count % loss.group_size:
            size = loss.group_size
            raise ValueError(
                f"{loss.display_name} needs groups of {size} sequences, but {name} has {count}; use a multiple of "
                f"{size}"
            )


def _with_counts(
    batch: BatchedDataDict,
    counts_of: Mapping[str, CountOfSequences],
    part: BatchedDataDict | None = None,
    ranks: RankReduction | None = None,
) -> BatchedDataDict:
    """Return a batch with counts over a global batch, repeated per sequence. Collective.

    `part` has the sequences of the batch that belong to the global batch (None: all), and `ranks` its other sequences.
    """
    if not counts_of:
        return batch
    own = torch.stack([count(batch if part is None else part).double().sum() for count in counts_of.values()])
    sums = (own if ranks is None else ranks.sum(own)).float()
    repeated = {key: value.expand(batch.size) for key, value in zip(counts_of, sums, strict=True)}
    return BatchedDataDict({**batch, **repeated})

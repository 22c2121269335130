"""Plan the optimizer steps of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.blocks import Blocks
from rl_megatron.batching.config import Batching, require_count
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.ownership import OwnershipPlanner, plan_ownership
from rl_megatron.batching.rank_plan import RankPlan, require_key
from rl_megatron.batching.step_microbatches import find_prefixes, plan_microbatches, plan_step
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.token_keys import declare_token_keys
from rl_megatron.losses.base import Loss
from rl_megatron.losses.contract import CountOfSequences
from rl_megatron.model.sharded_model import ShardedModel
from rl_megatron.training.inference import allow_sharing, prepare
from rl_megatron.training.metrics import Denominators
from rl_megatron.training.teacher import Teacher


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step on this rank: its microbatches, and the counts of the step's global batch."""

    plan: RankPlan
    denominators: Denominators


@dataclass(frozen=True)
class StepPlanner:
    """A planner of the optimizer steps of batches for a model."""

    model: ShardedModel
    cost: SequenceCost

    def plan_steps(
        self,
        batch: Batch,
        loss: Loss,
        batching: Batching,
        gbs: int,
        sizes: Sequence[int] | None = None,
        teacher: Teacher | None = None,
        on_policy: bool = True,
    ) -> Iterator[OptimizerStep]:
        """Check a batch, and return an iterator over its optimizer steps, which plans each step when it is requested.

        It is collective over the ranks that share the batch; arguments and errors are those of `MegatronPolicy.train`.
        """
        declare_token_keys(*loss.next_token_keys)
        if sizes is not None:
            for number, size in enumerate(sizes):
                require_count(f"sizes[{number}]", size)
            if sum(sizes) != batch.size:
                raise ValueError(f"sizes {list(sizes)} must add up to the batch, which has {batch.size} sequences")
        _require_logprobs(batch, loss, on_policy, -(-batch.size // gbs) if sizes is None else len(sizes))
        per_microbatch = {"mbs": batching.sequences} if batching.kind == "padded" else {}
        _require_whole_groups(loss, {"the batch": batch.size, "gbs": gbs, **per_microbatch})
        counters = {key: count for key, count in loss.global_counts.items() if key not in batch}

        for key in ("token_mask", "sample_mask"):
            require_key(batch, key)
        batch = prepare(self.model, batch)
        batching = batching if teacher is None else allow_sharing(batching, teacher.backend)
        parts = pairwise([0, *(accumulate(sizes) if sizes else [*range(gbs, batch.size, gbs), batch.size])])
        steps = (self._plan(batch, *part, batching, loss.group_size, counters) for part in parts)
        if teacher is None:
            return steps
        return (replace(step, plan=teacher.attach_logits(step.plan)) for step in steps)

    def _plan(
        self,
        batch: Batch,
        start: int,
        stop: int,
        batching: Batching,
        group_size: int,
        counters: Mapping[str, CountOfSequences],
    ) -> OptimizerStep:
        """Return this rank's part of the step that has the sequences `start` to `stop - 1`. Collective."""
        topology = self.model.topology
        step = plan_step(batch, start, stop, batching, topology, topology.data_rank, group_size, self.cost)
        part = batch.slice(start, stop)
        if counters:
            batch = replace(batch, local=_add_counts(batch, part, counters))
        return OptimizerStep(plan_microbatches(batch, step), Denominators.count(part, batch.ranks))

    def distribute(self, batch: Batch, batching: Batching, sizes: Sequence[int], groups: Tensor | None) -> Batch:
        """Return the batch with every sequence on the rank that trains on it; see `MegatronPolicy.distribute`."""
        topology = self.model.topology
        planner = OwnershipPlanner(
            batch.lengths.numpy(), batch.width, batching, topology, self.cost, Blocks(topology.data),
            groups=None if groups is None else groups.numpy(),
            prefixes=find_prefixes(batch, batching, topology),
        )  # fmt: skip
        ownership = plan_ownership(planner, sizes, batch.homes.numpy(), topology.data_rank, batch.ranks)
        return batch.move_to_owners(ownership)


def _require_logprobs(batch: Batch, loss: Loss, on_policy: bool, steps: int) -> None:
    """Refuse a batch without logprobs that the loss reads, unless a single on-policy step can compute them."""
    missing = ", ".join(repr(key) for key in sorted(loss.on_policy_keys) if key not in batch)
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
            f"{loss.display_name} needs {missing}, because only the first of {steps} optimizer steps is on-policy: "
            f"{compute}"
        )


def _require_whole_groups(loss: Loss, counts: Mapping[str, int]) -> None:
    """Refuse `counts` that would separate sequences that the loss needs together, such as preference pairs."""
    for name, count in counts.items():
        if count % loss.group_size:
            size = loss.group_size
            raise ValueError(
                f"{loss.display_name} needs groups of {size} sequences, but {name} has {count}; use a multiple of "
                f"{size}"
            )


def _add_counts(batch: Batch, part: BatchedDataDict, counters: Mapping[str, CountOfSequences]) -> BatchedDataDict:
    """Add the counts of a step's global batch to this rank's sequences, repeated for each sequence. Collective.

    `part` has this rank's sequences of the step.
    """
    counts = batch.ranks.sum(torch.stack([count(part).double().sum() for count in counters.values()])).float()
    repeated = {key: value.expand(len(batch.numbers)) for key, value in zip(counters, counts, strict=True)}
    return BatchedDataDict({**batch.local, **repeated})

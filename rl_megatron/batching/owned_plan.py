"""The microbatches of the sequences that a rank owns: those that its ownership follows from, or others."""

from __future__ import annotations

from rl_megatron.batching.blocks import Blocks
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.batching.ownership import PADDING, OwnedStep, OwnershipPlanner, agreed_shapes
from rl_megatron.batching.rank_plan import RankPlan
from rl_megatron.batching.sharded import ShardedBatch
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology.degrees import SequenceLayout


def plan_owned(
    batch: ShardedBatch,
    start: int,
    stop: int,
    batching: Batching,
    layout: SequenceLayout,
    group_size: int = 1,
    cost: SequenceCost = SequenceCost(),
) -> OwnedStep:
    """Return the microbatches of this rank's sequences among some of the global batch. Collective.

    Ranks have as many microbatches. The plan that the ownership follows from is used if it is for the same sequences.
    Otherwise every rank packs its own sequences, and all agree on the number.

    Args:
        batch: The batch, whose sequences are with their owners.
        start: The number of the first sequence in the global batch.
        stop: The number behind the last sequence.
        batching: How sequences form microbatches.
        layout: The layout.
        group_size: Sequences in a row that stay together. All of a group have the same owner.
        cost: The cost of a sequence.

    Raises:
        ConfigError: A group alone exceeds `batching.tokens`.
    """
    for step in batch.steps:
        if (step.start, step.stop, step.batching, step.group_size) == (start, stop, batching, group_size):
            return step
    own = batch.numbers[(batch.numbers >= start) & (batch.numbers < stop)]
    planner = OwnershipPlanner(batch.lengths, batch.width, batching, layout, cost, Blocks(1), group_size)
    planner.check_longest()
    _, (shapes,) = planner.of_block(own, 1)
    ((shapes, efficiency),) = agreed_shapes([shapes], group_size, batch.ranks)
    return OwnedStep(start, stop, batching, group_size, shapes, efficiency)


def owned_microbatches(batch: ShardedBatch, step: OwnedStep) -> RankPlan:
    """Return the microbatches of a step with their sequences."""
    shapes = step.shapes
    planned = zip(shapes.sequences, shapes.widths, strict=True)
    return RankPlan([_microbatch(batch, step, chosen, width) for chosen, width in planned], step.efficiency)


def _microbatch(batch: ShardedBatch, step: OwnedStep, chosen: list[int], width: int) -> Microbatch:
    if step.batching.kind == "padded":
        return Microbatch(batch.sequences(chosen, batch.width))
    if step.batching.kind == "dynamic":
        return Microbatch(batch.sequences(chosen, min(width, batch.width)))
    lengths = tuple(1 if number == PADDING else max(int(batch.lengths[number]), 1) for number in chosen)
    return Microbatch(batch.sequences(chosen, max(lengths)), lengths)


def part_of(batch: ShardedBatch, start: int, stop: int) -> BatchedDataDict:
    """Return this rank's sequences among those from `start` to `stop - 1`, as views."""
    first, last = batch.numbers.searchsorted([start, stop]).tolist()
    return batch.own.slice(first, last)

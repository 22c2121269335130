"""The microbatches of each rank in an optimizer step, or in a pass over a whole batch."""

from __future__ import annotations

import numpy as np

from rl_megatron.batching.batch import Batch
from rl_megatron.batching.blocks import Blocks
from rl_megatron.batching.config import Batching
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import PADDING, Microbatch, RankMicrobatches, StepPlan
from rl_megatron.batching.ownership import OwnershipPlanner, agree_on_counts, build_rank_microbatches
from rl_megatron.batching.rank_plan import RankPlan, plan_lengths
from rl_megatron.batching.shared_prefixes import SharedPrefixes
from rl_megatron.topology.degrees import SequenceLayout, zigzag_slices


def plan_step(
    batch: Batch,
    start: int,
    stop: int,
    batching: Batching,
    layout: SequenceLayout,
    data_rank: int,
    group_size: int = 1,
    cost: SequenceCost = SequenceCost(),
) -> StepPlan:
    """Return the plan of one optimizer step of a batch. Collective over the ranks that share the batch.

    All ranks have the same number of microbatches. If the batch is whole, each rank plans for all ranks. Otherwise a
    plan in `batch.steps` for the same sequences is used. Without such a plan, each rank packs the sequences that it
    owns, and all ranks agree on the number of microbatches.

    Args:
        batch: The batch, whole or after `Batch.move_to_owners`.
        start: The number of the first sequence in the global batch.
        stop: The number of the last sequence, plus 1.
        batching: How sequences form microbatches.
        layout: The layout, whose data-parallel ranks compute the batch.
        data_rank: This data-parallel rank.
        group_size: The number of consecutive sequences that stay together: 2 for preference pairs. They have one owner.
        cost: The cost of a sequence, by which packs are balanced.

    Raises:
        ConfigError: A group alone exceeds `batching.tokens`.
    """
    prefixes = find_prefixes(batch, batching, layout)
    if batch.is_whole:
        lengths = batch.lengths[start:stop].tolist()
        of_step = None if prefixes is None else prefixes.take(np.arange(start, stop))
        planned = plan_lengths(lengths, batch.width, batching, layout, layout.data, group_size, cost, of_step)
        ranks = build_rank_microbatches(planned, range(start, stop), lengths, layout)
        return StepPlan(start, stop, batching, group_size, ranks, planned.efficiency, data_rank, prefixes)
    for step in batch.steps:
        if (step.start, step.stop, step.batching, step.group_size) == (start, stop, batching, group_size):
            return step
    numbers = batch.numbers[(batch.numbers >= start) & (batch.numbers < stop)].numpy()
    planner = OwnershipPlanner(
        batch.lengths.numpy(), batch.width, batching, layout, cost, Blocks(1), group_size, prefixes=prefixes
    )
    planner.check_longest()
    _, microbatches = planner.plan_block(numbers, 1)
    ((microbatches, efficiency),) = agree_on_counts(microbatches, group_size, batch.ranks)
    return StepPlan(start, stop, batching, group_size, [microbatches], efficiency, prefixes=prefixes)


def find_prefixes(batch: Batch, batching: Batching, layout: SequenceLayout) -> SharedPrefixes | None:
    """Return what the sequences of a batch share in a layout, or None if they share nothing."""
    if batch.prefixes is None or not batching.share_prefixes:
        return None
    return batch.prefixes.round_down(zigzag_slices(layout.context))


def plan_microbatches(batch: Batch, step: StepPlan) -> RankPlan:
    """Return this rank's microbatches of a step with their sequences."""
    return RankPlan(form_microbatches(batch, step, step.local), step.efficiency)


def form_microbatches(batch: Batch, step: StepPlan, microbatches: RankMicrobatches) -> list[Microbatch]:
    """Return microbatches of a step with their sequences, in the order in which they run."""
    if microbatches.shares_prefixes:
        return [_form_tree(batch, step, numbers) for numbers in microbatches.sequences]
    return [
        _form_microbatch(batch, step, numbers, width)
        for numbers, width in zip(microbatches.sequences, microbatches.widths, strict=True)
    ]


def _form_tree(batch: Batch, step: StepPlan, numbers: list[int]) -> Microbatch:
    assert step.prefixes is not None, "a plan shares prefixes only if they are known"
    lengths = _count_tokens(batch, numbers)
    tree = step.prefixes.grow(numbers, lengths)
    return Microbatch(batch.take_sequences(numbers, max(lengths), step.start), lengths, tree)


def _form_microbatch(batch: Batch, step: StepPlan, numbers: list[int], width: int) -> Microbatch:
    if step.batching.kind == "padded":
        return Microbatch(batch.take_sequences(numbers, None, step.start))
    if step.batching.kind == "dynamic":
        return Microbatch(batch.take_sequences(numbers, width, step.start))
    lengths = _count_tokens(batch, numbers)
    return Microbatch(batch.take_sequences(numbers, max(lengths), step.start), lengths)


def _count_tokens(batch: Batch, numbers: list[int]) -> tuple[int, ...]:
    """Return the number of tokens of each sequence in a pack."""
    return tuple(1 if number == PADDING else max(int(batch.lengths[number]), 1) for number in numbers)

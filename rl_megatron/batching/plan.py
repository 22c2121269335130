"""Which sequences form which microbatch on which data-parallel rank: one plan for all ranks, made before any starts.

Ranks that chose their own microbatches would disagree on how many there are and wait for each other for ever. So every
rank plans for every rank, from the whole global batch, and all have the same number of microbatches, of similar cost.
A shard is the part of one data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from rl_megatron.batching.balance import Groups, balanced_shards, deal, imbalance
from rl_megatron.batching.config import Batching, BatchingKind, DynamicPlanArgs, PackingPlanArgs
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.batching.packing import Packs, pack_sequences, round_up, split_packs
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.topology.degrees import RankLayout, SequenceLayout, zigzag_slices

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class MicrobatchPlan:
    """The microbatches of all shards, and what they cost. Every attribute is indexed `[shard][microbatch]`.

    Attributes:
        sequences: Numbers of the sequences, counted from the batch's first.
        lengths: The width to cut to (dynamic batching), or the tokens in all, each sequence padded to its multiple
            (packing).
        tokens: Tokens of the sequences themselves, without any padding.
        slots: Token positions computed: sequences times width (dynamic batching), or `lengths` (packing).
        costs: Costs of the sequences as wide as they are computed, by the planned `SequenceCost`, in its unit.
    """

    sequences: list[list[list[int]]]
    lengths: list[list[int]]
    tokens: list[list[int]]
    slots: list[list[int]]
    costs: list[list[float]]

    @property
    def efficiency(self) -> float:
        """Return the tokens per token position computed, over all shards; 1 without padding."""
        slots = sum(chain.from_iterable(self.slots))
        return sum(chain.from_iterable(self.tokens)) / slots if slots else 1.0

    @property
    def shard_imbalance(self) -> float:
        """Return by how much the costliest shard exceeds the mean of the shards.

        At 0.02 an optimizer step takes 2 % longer than necessary.
        """
        return imbalance([sum(shard) for shard in self.costs])

    @property
    def microbatch_imbalance(self) -> float:
        """Return by how much the costliest of the k-th microbatches of all shards exceeds their mean, for the worst k.

        It is the waiting time of shards that meet in every microbatch, as those that share a model's experts do.
        """
        return max(map(imbalance, zip(*self.costs, strict=True)), default=0.0)


@dataclass(frozen=True)
class RankPlan:
    """The microbatches of this data-parallel rank; every rank has the same number of them.

    Attributes:
        microbatches: In the order in which they run.
        sequences: The index in the global batch of each of their sequences, in the order of the microbatches.
            Numbers from `num_sequences` to `num_padded` are padding sequences with zero loss weight.
        num_sequences: Sequences of the global batch.
        num_padded: Sequences of the global batch with its padding sequences.
        efficiency: Tokens of the global batch per token slot that the model computes, over all ranks. The zero-weight
            microbatches that an interleaved pipeline may add are not counted.
    """

    microbatches: list[Microbatch]
    sequences: tuple[int, ...]
    num_sequences: int
    num_padded: int
    efficiency: float

    def spread(self, streams: list[Tensor], width: int, first_column: int, entry: Tensor) -> Tensor:
        """Put the microbatches' results back into the order of the global batch; other positions get `entry`.

        Args:
            streams: `[b, ·, …]` of each microbatch, whose first column is column `first_column` of the batch. The list
                is empty on pipeline stages that have no output.
            width: S of the global batch.
            first_column: Where the streams begin.
            entry: `[…]` of zeros, which this rank has if it has no value.

        Returns:
            `[num_sequences, width, …]`.
        """
        whole = entry.expand(self.num_padded, width, *entry.shape).clone()
        start = 0
        for stream in streams:
            places = torch.tensor(self.sequences[start : start + stream.size(0)], device=entry.device)
            whole[places, first_column : first_column + stream.size(1)] = stream
            start += stream.size(0)
        return whole[: self.num_sequences]


def plan_microbatches(
    batch: BatchedDataDict,
    lengths: list[int],
    batching: Batching,
    topology: RankLayout,
    group_size: int = 1,
    cost: SequenceCost = SequenceCost(),
) -> RankPlan:
    """Return this rank's microbatches of a global batch.

    Args:
        batch: The global batch, the same on every rank. It stays as it is.
        lengths: Tokens of each sequence, see `sequence_lengths`.
        batching: How sequences form microbatches.
        topology: The layout; its data-parallel ranks share the batch.
        group_size: Sequences that stay together, in order: 2 for preference pairs.
        cost: The cost of a sequence, by which packs are balanced.

    Raises:
        ConfigError: A group alone exceeds `batching.tokens`.
    """
    whole = plan_global_batch(batch, lengths, batching, topology, group_size, cost)
    ours = whole.plan.sequences[topology.data_rank]
    microbatches, sequences = whole.microbatches(topology.data_rank), tuple(chain.from_iterable(ours))
    return RankPlan(microbatches, sequences, batch.size, whole.batch.size, whole.efficiency)


@dataclass(frozen=True)
class GlobalPlan:
    """The microbatches of a global batch on all data-parallel ranks.

    Attributes:
        kind: How sequences form microbatches.
        batch: The global batch with its padding sequences.
        lengths: Tokens of each of its sequences, at least 1.
        plan: Which sequences form which microbatch.
        efficiency: Tokens of the global batch per token slot that the model computes, over all ranks.
    """

    kind: BatchingKind
    batch: BatchedDataDict
    lengths: list[int]
    plan: MicrobatchPlan
    efficiency: float

    def microbatches(self, shard: int) -> list[Microbatch]:
        """Return the microbatches of a data-parallel rank, in the order in which they run."""
        planned = zip(self.plan.sequences[shard], self.plan.lengths[shard], strict=True)
        return [_microbatch(self.kind, self.batch, chosen, self.lengths, width) for chosen, width in planned]


def plan_global_batch(
    batch: BatchedDataDict,
    lengths: list[int],
    batching: Batching,
    layout: SequenceLayout,
    group_size: int = 1,
    cost: SequenceCost = SequenceCost(),
) -> GlobalPlan:
    """Return the microbatches of all data-parallel ranks; the arguments are those of `plan_microbatches`.

    Raises:
        ConfigError: A group alone exceeds `batching.tokens`.
    """
    num_sequences, num_shards = batch.size, layout.data
    per_rank = -(-num_sequences // (num_shards * group_size)) * group_size
    padded_batching = min(batching.sequences, per_rank)
    batch = batch.pad_to_multiple(num_shards * (padded_batching if batching.kind == "padded" else group_size))
    if batch.size > num_sequences and "input_lengths" in batch:
        batch["input_lengths"][num_sequences:] = 1  # a padding sequence needs no more than one token
    num_tokens = sum(lengths)
    lengths = [max(length, 1) for length in lengths] + [1] * (batch.size - num_sequences)
    try:
        plan = _plan_for_layout(
            batching, lengths, batch["input_ids"].size(1), layout, padded_batching, group_size, cost
        )
    except ValueError as error:
        raise ConfigError(
            f"train.batching={batching.kind}, train.micro_batch_tokens={batching.tokens}: {error}"
        ) from error
    slots = sum(round_up(slots, layout.sequence_multiple) for slots in chain.from_iterable(plan.slots))
    return GlobalPlan(batching.kind, batch, lengths, plan, num_tokens / slots)


def _plan_for_layout(
    batching: Batching,
    lengths: list[int],
    width: int,
    layout: SequenceLayout,
    sequences_per_microbatch: int,
    group_size: int,
    cost: SequenceCost,
) -> MicrobatchPlan:
    """Return the plan for all ranks, within the budget even after the layout has padded the microbatches."""
    multiple, num_shards = layout.sequence_multiple, layout.data
    width = round_up(width, multiple)
    budget = batching.tokens // multiple * multiple
    if batching.kind == "padded":
        return plan_padded(lengths, width, num_shards, sequences_per_microbatch, cost)
    if batching.kind == "dynamic":
        dynamic = DynamicPlanArgs(budget, group_size=group_size, cost=cost, sequence_length_round=multiple)
        return plan_dynamic_batching(lengths, width, num_shards, dynamic)
    slices = zigzag_slices(layout.context)
    packing = PackingPlanArgs(budget, group_size=group_size, cost=cost, sequence_length_pad_multiple=slices)
    return plan_sequence_packing(lengths, num_shards, packing)


def _microbatch(
    kind: BatchingKind, batch: BatchedDataDict, chosen: list[int], lengths: list[int], width: int
) -> Microbatch:
    if kind == "padded":
        return Microbatch(batch.select_indices(chosen))
    if kind == "dynamic":
        return Microbatch(_cut(batch, width).select_indices(chosen))
    ours = tuple(lengths[sequence] for sequence in chosen)
    return Microbatch(_cut(batch, max(ours)).select_indices(chosen), ours)


def _cut(batch: BatchedDataDict, width: int) -> BatchedDataDict:
    """Return the first `width` tokens of every tensor that is as wide as the tokens, and all of every other."""
    whole = batch["input_ids"].size(1)
    return BatchedDataDict(
        {
            key: value[:, :width] if isinstance(value, Tensor) and value.dim() > 1 and value.size(1) == whole else value
            for key, value in batch.items()
        }
    )


def plan_padded(
    lengths: Sequence[int], width: int, num_shards: int, sequences_per_microbatch: int, cost: SequenceCost
) -> MicrobatchPlan:
    """Plan neighbouring sequences on one shard, in order, so many at a time, all `width` tokens wide.

    Raises:
        ValueError: The sequences do not divide over shards and microbatches.
    """
    num_sequences = len(lengths)
    if num_sequences % (num_shards * sequences_per_microbatch):
        raise ValueError(
            f"{num_sequences} sequences do not divide over {num_shards} shards in microbatches of "
            f"{sequences_per_microbatch}: append padding sequences with "
            f"`pad_to_multiple({num_shards * sequences_per_microbatch})`."
        )
    share = num_sequences // num_shards
    sequences = [
        [
            list(range(start, start + sequences_per_microbatch))
            for start in range(first, first + share, sequences_per_microbatch)
        ]
        for first in range(0, num_sequences, share)
    ]
    return MicrobatchPlan(
        sequences,
        lengths=[[width] * len(shard) for shard in sequences],
        tokens=_sums(sequences, lengths),
        slots=[[sequences_per_microbatch * width] * len(shard) for shard in sequences],
        costs=[[sequences_per_microbatch * cost(width)] * len(shard) for shard in sequences],
    )


def plan_dynamic_batching(lengths: Sequence[int], width: int, num_shards: int, args: DynamicPlanArgs) -> MicrobatchPlan:
    """Plan microbatches of sequences of similar length, of the same shapes on all shards.

    The groups are sorted by length and dealt to the shards in turn, in the opposite direction in every second round. So
    the k-th groups of all shards have similar lengths, and the shards have about as many tokens. Then all shards are
    cut at the same places: before every group that would exceed the budget. As all shards compute the same shapes, the
    imbalance is 0, whatever the cost.

    Args:
        lengths: Tokens of each sequence.
        width: S, the width of the batch: rounding a length up never exceeds it.
        num_shards: Data-parallel ranks.
        args: The budget and the groups.

    Raises:
        ValueError: The sequences do not divide over the shards in whole groups, or one group alone exceeds the budget.
    """
    num_groups = _num_groups(len(lengths), num_shards, args.group_size)
    group_lengths = [max(lengths[member] for member in _members(group, args.group_size)) for group in range(num_groups)]
    order = sorted(range(num_groups), key=group_lengths.__getitem__)
    places = [order[start : start + num_shards] for start in range(0, num_groups, num_shards)]
    longest = [place[-1] for place in places]
    for place in places[1::2]:
        place.reverse()

    cuts: list[list[list[int]]] = []  # microbatch → places → one group per shard
    cut_lengths: list[int] = []
    for place, group in zip(places, longest, strict=True):
        length = min(round_up(group_lengths[group], args.sequence_length_round), width)
        _require_within_budget(group, length, args)
        fits = cuts and (len(cuts[-1]) + 1) * args.group_size * length <= args.max_tokens_per_microbatch
        if fits:  # groups come in order of length, so this one is the longest so far
            cuts[-1].append(place)
            cut_lengths[-1] = length
        else:
            cuts.append([place])
            cut_lengths.append(length)
    sequences = [
        [list(chain.from_iterable(_members(place[shard], args.group_size) for place in cut)) for cut in cuts]
        for shard in range(num_shards)
    ]
    shapes = [(len(cut) * args.group_size, length) for cut, length in zip(cuts, cut_lengths, strict=True)]
    return MicrobatchPlan(
        sequences,
        lengths=[list(cut_lengths) for _ in sequences],
        tokens=_sums(sequences, lengths),
        slots=[[size * length for size, length in shapes] for _ in sequences],
        costs=[[size * args.cost(length) for size, length in shapes] for _ in sequences],
    )


def _require_within_budget(group: int, length: int, args: DynamicPlanArgs) -> None:
    needed = length * args.group_size
    if needed > args.max_tokens_per_microbatch:
        raise ValueError(
            f"sequence {group * args.group_size} needs {args.group_size} x {length} tokens (rounded up to "
            f"{args.sequence_length_round}) and max_tokens_per_microbatch is {args.max_tokens_per_microbatch}: "
            f"raise it to at least {needed} or shorten the sequences."
        )


def plan_sequence_packing(
    lengths: Sequence[int], num_shards: int, args: PackingPlanArgs, allow_uneven: bool = False
) -> MicrobatchPlan:
    """Plan packs of sequences, the same number for every shard, dealt out by cost.

    The shards' k-th microbatches are of similar cost, and so are their sums. Every shard begins with its costliest.

    Raises:
        ValueError: The sequences do not divide over the shards in whole groups (unless `allow_uneven`), there are fewer
            groups than shards, or one group alone exceeds the budget.
    """
    num_groups = _num_groups(len(lengths), 1 if allow_uneven else num_shards, args.group_size)
    members = [_members(group, args.group_size) for group in range(num_groups)]
    padded = [round_up(length, args.sequence_length_pad_multiple) for length in lengths]
    costs = [args.cost(length) for length in padded]
    groups = Groups(
        lengths=[sum(padded[member] for member in group) for group in members],
        costs=[sum(costs[member] for member in group) for group in members],
        capacity=args.max_tokens_per_microbatch,
    )
    shards = _pack(groups, num_shards, args.algorithm)
    sequences = [[list(chain.from_iterable(members[group] for group in pack)) for pack in shard] for shard in shards]
    slots = _sums(sequences, padded)
    tokens = _sums(sequences, lengths)
    return MicrobatchPlan(sequences, lengths=slots, tokens=tokens, slots=slots, costs=_sums(sequences, costs))


def _pack(groups: Groups, num_shards: int, algorithm: str) -> list[Packs]:
    if algorithm == "balanced":
        return balanced_shards(groups, num_shards)
    packs = pack_sequences(groups.lengths, groups.capacity, algorithm)
    return deal(groups, split_packs(packs, groups.lengths, round_up(len(packs), num_shards)), num_shards)


def _sums(sequences: list[list[list[int]]], values: Sequence[_Number]) -> list[list[_Number]]:
    """Return the sum of the sequences' values in every microbatch of every shard."""
    # A sum begins with the int 0, which is also a float.
    return [  # pyright: ignore[reportReturnType]
        [sum(values[sequence] for sequence in microbatch) for microbatch in shard] for shard in sequences
    ]


def _num_groups(num_sequences: int, num_shards: int, group_size: int) -> int:
    multiple = num_shards * group_size
    if num_sequences % multiple:
        raise ValueError(
            f"{num_sequences} sequences do not divide over {num_shards} shards in groups of {group_size}: append "
            f"padding sequences with `pad_to_multiple({multiple})`."
        )
    return num_sequences // group_size


def _members(group: int, group_size: int) -> range:
    return range(group * group_size, (group + 1) * group_size)


def sequence_lengths(batch: Mapping[str, Tensor]) -> list[int]:
    """Return the tokens of each sequence: its `input_lengths`, or all of its width.

    Raises:
        ValueError: A length does not fit the width, or a token that counts lies past the end of its sequence.
    """
    num_sequences, width = batch["input_ids"].shape
    if "input_lengths" not in batch:
        return [width] * num_sequences
    lengths = batch["input_lengths"].cpu()
    wrong = ((lengths < 0) | (lengths > width)).nonzero()
    if len(wrong):
        number = int(wrong[0].item())
        raise ValueError(f"input_lengths[{number}]={lengths[number].item()} does not fit sequences of {width} tokens")
    if "token_mask" in batch:
        mask = batch["token_mask"].cpu()
        lost = ((mask != 0) & (torch.arange(width) >= lengths[:, None])).nonzero()
        if len(lost):
            number, position = lost[0].tolist()
            raise ValueError(
                f"token_mask[{number}, {position}] counts a token past the sequence's end: input_lengths[{number}]="
                f"{lengths[number].item()}"
            )
    return lengths.tolist()

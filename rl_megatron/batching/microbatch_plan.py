"""Plan which sequences form which microbatch of which shard, from their lengths alone.

A shard is one data-parallel rank's part of the batch. All shards get the same number of microbatches, of similar cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

from rl_megatron.batching.balance import Groups, balance_shards, deal, imbalance
from rl_megatron.batching.config import DynamicPlanArgs, PackingPlanArgs, require_count
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.packing import Packs, pack_sequences, round_up, split_packs

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class MicrobatchPlan:
    """The microbatches of all shards, and their costs. Every attribute is indexed `[shard][microbatch]`.

    Attributes:
        sequences: The indices of the sequences in the batch.
        lengths: The padded length of each sequence (padded and dynamic batching), or of the whole pack (packing).
        tokens: Tokens of the sequences themselves, without any padding.
        slots: Tokens with padding: sequences times padded length (padded and dynamic batching), or `lengths` (packing).
        costs: The costs of the padded sequences, in the unit of the plan's `SequenceCost`.
    """

    sequences: list[list[list[int]]]
    lengths: list[list[int]]
    tokens: list[list[int]]
    slots: list[list[int]]
    costs: list[list[float]]

    @property
    def efficiency(self) -> float:
        """Return the number of tokens per token slot, over all shards."""
        slots = sum(chain.from_iterable(self.slots))
        return sum(chain.from_iterable(self.tokens)) / slots if slots else 1.0

    @property
    def shard_imbalance(self) -> float:
        """Return by how much the costliest shard's cost exceeds the mean, as a share of the mean.

        At 0.02 an optimizer step takes 2 % longer than necessary.
        """
        return imbalance([sum(shard) for shard in self.costs])

    @property
    def microbatch_imbalance(self) -> float:
        """Return the imbalance of the shards' k-th microbatches for the k at which it is largest.

        It bounds the relative waiting time of shards that synchronize in every microbatch, as expert-parallel ranks do.
        """
        return max(map(imbalance, zip(*self.costs, strict=True)), default=0.0)


def plan_padded(
    lengths: Sequence[int], width: int, num_shards: int, sequences_per_microbatch: int, cost: SequenceCost
) -> MicrobatchPlan:
    """Plan microbatches of neighbouring sequences, in order, all `width` tokens wide."""
    num_sequences = len(lengths)
    require_count("num_shards", num_shards)
    require_count("sequences_per_microbatch", sequences_per_microbatch)
    require_within_width(lengths, width)
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
        for first in (shard * share for shard in range(num_shards))
    ]
    return MicrobatchPlan(
        sequences,
        lengths=[[width] * len(shard) for shard in sequences],
        tokens=_sums(sequences, lengths),
        slots=[[sequences_per_microbatch * width] * len(shard) for shard in sequences],
        costs=[[sequences_per_microbatch * cost(width)] * len(shard) for shard in sequences],
    )


def plan_dynamic_batching(lengths: Sequence[int], width: int, num_shards: int, args: DynamicPlanArgs) -> MicrobatchPlan:
    """Plan microbatches of sequences of similar length, with the same shapes on all shards.

    The groups are sorted by length and dealt to the shards in rounds of alternating direction. So the k-th groups of
    all shards have similar lengths, and shards have similar numbers of tokens. All shards start new microbatches in the
    same rounds: whenever the next groups no longer fit the token budget. As all shards compute the same shapes, the
    imbalance is 0.

    Rounded lengths never exceed `width`, the width of the batch.
    """
    num_groups = _num_groups(len(lengths), num_shards, args.group_size)
    require_within_width(lengths, width)
    group_lengths = [max(lengths[member] for member in _members(group, args.group_size)) for group in range(num_groups)]
    order = sorted(range(num_groups), key=group_lengths.__getitem__)
    rounds = [order[start : start + num_shards] for start in range(0, num_groups, num_shards)]
    longest = [round_[-1] for round_ in rounds]
    for round_ in rounds[1::2]:
        round_.reverse()

    cuts: list[list[list[int]]] = []  # microbatch → rounds → one group per shard
    cut_lengths: list[int] = []
    for round_, group in zip(rounds, longest, strict=True):
        length = min(round_up(group_lengths[group], args.sequence_length_round), width)
        _require_within_budget(group, length, args)
        fits = cuts and (len(cuts[-1]) + 1) * args.group_size * length <= args.max_tokens_per_microbatch
        if fits:  # groups come in order of length, so this one is the longest so far
            cuts[-1].append(round_)
            cut_lengths[-1] = length
        else:
            cuts.append([round_])
            cut_lengths.append(length)
    sequences = [
        [list(chain.from_iterable(_members(round_[shard], args.group_size) for round_ in cut)) for cut in cuts]
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
            f"sequence {group * args.group_size} needs {args.group_size} x {length} tokens (rounded up to multiples of "
            f"{args.sequence_length_round}), but max_tokens_per_microbatch is {args.max_tokens_per_microbatch}: "
            f"raise it to at least {needed} or shorten the sequences."
        )


def plan_sequence_packing(
    lengths: Sequence[int], num_shards: int, args: PackingPlanArgs, allow_uneven: bool = False
) -> MicrobatchPlan:
    """Plan packs of sequences, the same number for every shard.

    The shards' k-th packs have similar costs, and so have whole shards. Every shard begins with its costliest pack. The
    number of groups must be a multiple of `num_shards` unless `allow_uneven`.
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
        return balance_shards(groups, num_shards)
    packs = pack_sequences(groups.lengths, groups.capacity, algorithm)
    return deal(groups, split_packs(packs, groups.lengths, round_up(len(packs), num_shards)), num_shards)


def _sums(sequences: list[list[list[int]]], values: Sequence[_Number]) -> list[list[_Number]]:
    """Return the sum of the sequences' values in every microbatch of every shard."""
    # pyright objects because a sum begins with the int 0, but an int can stand for a float.
    return [  # pyright: ignore[reportReturnType]
        [sum(values[sequence] for sequence in microbatch) for microbatch in shard] for shard in sequences
    ]


def require_within_width(lengths: Sequence[int], width: int) -> None:
    """Raise ValueError if a length is negative or exceeds the batch's `width`."""
    for index, length in enumerate(lengths):
        if not 0 <= length <= width:
            raise ValueError(f"sequence {index} has length {length}, but the batch is {width} tokens wide.")


def _num_groups(num_sequences: int, num_shards: int, group_size: int) -> int:
    require_count("num_shards", num_shards)
    multiple = num_shards * group_size
    if num_sequences % multiple:
        raise ValueError(
            f"{num_sequences} sequences do not divide over {num_shards} shards in groups of {group_size}: append "
            f"padding sequences with `pad_to_multiple({multiple})`."
        )
    return num_sequences // group_size


def _members(group: int, group_size: int) -> range:
    return range(group * group_size, (group + 1) * group_size)

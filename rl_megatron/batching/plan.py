"""Which rows form which microbatch on which shard, decided for all shards at once.

Ranks that chose their own microbatches would disagree on how many there are and wait for each other for ever. So both
plans here give every shard the same number of microbatches, of like cost: dynamic batching by cutting all shards at the
same positions, sequence packing by making packs that divide over the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Self

from rl_megatron.batching.balance import Units, balanced_shards, deal, imbalance
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.packing import ALGORITHMS, Packs, pack_sequences, split_packs
from rl_megatron.config.errors import unknown_name

_PACKING = ("balanced", *ALGORITHMS)


@dataclass(frozen=True)
class _MicrobatchArgs:
    max_tokens_per_microbatch: int
    input_key: str = "input_ids"
    input_lengths_key: str = "input_lengths"
    unit_size: int = 1
    cost: SequenceCost = SequenceCost()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{type(self).__name__}.{field.name} must be at least 1, got {value}.")

    @classmethod
    def of(cls, args: Self | Mapping[str, Any]) -> Self:
        """`args` itself, or the same from a mapping; an unknown or missing key raises ValueError."""
        if isinstance(args, cls):
            return args
        known = [field.name for field in fields(cls)]
        for key in args:
            if key not in known:
                raise unknown_name(f"key of {cls.__name__}", key, known)
        if "max_tokens_per_microbatch" not in args:
            raise ValueError(f"{cls.__name__} needs the key 'max_tokens_per_microbatch', got {sorted(args)}.")
        cost = args.get("cost")
        return cls(**{**args, "cost": SequenceCost(**cost)} if isinstance(cost, Mapping) else args)


@dataclass(frozen=True)
class DynamicBatchingArgs(_MicrobatchArgs):
    """Microbatches of rows of like length, each cut to its longest row: rows x length stays within the budget.

    Attributes:
        max_tokens_per_microbatch: rows times padded length of one microbatch, at most.
        input_key: the key of the `[B, S]` token ids.
        input_lengths_key: the key of the `[B]` lengths.
        unit_size: rows that stay together, in order: 2 for preference pairs.
        cost: of a row, as wide as its microbatch, in the plan's figures; a `SequenceCost` or a mapping of its fields.
        sequence_length_round: a microbatch's length is a multiple of this, but never wider than S.
    """

    sequence_length_round: int = 1


@dataclass(frozen=True)
class SequencePackingArgs(_MicrobatchArgs):
    """Microbatches whose rows fit one packed row of `max_tokens_per_microbatch` tokens.

    Attributes:
        max_tokens_per_microbatch: tokens of one pack, at most, each sequence rounded up to its multiple.
        input_key: the key of the `[B, S]` token ids.
        input_lengths_key: the key of the `[B]` lengths.
        unit_size: rows that stay together, in order: 2 for preference pairs.
        cost: of a sequence, which "balanced" makes equal over packs and shards; a `SequenceCost` or a mapping of its
            fields.
        algorithm: "balanced" (few packs of equal cost, see `rl_megatron.batching.balance`), or a key of
            `rl_megatron.batching.packing.ALGORITHMS` (few packs).
        sequence_length_pad_multiple: each sequence's length in the pack is a multiple of this (2·cp, times tp under
            sequence parallelism).
    """

    algorithm: str = "balanced"
    sequence_length_pad_multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm not in _PACKING:
            raise unknown_name("packing algorithm", self.algorithm, _PACKING)


@dataclass(frozen=True)
class MicrobatchPlan:
    """Microbatches of one chunk, and what they cost. Every attribute is indexed `[shard][microbatch]`.

    Attributes:
        rows: row numbers, counted from the chunk's first.
        lengths: width to cut to (dynamic batching) or tokens in all, each sequence padded to its multiple (packing).
        tokens: tokens of the sequences themselves, without any padding.
        slots: token positions computed: rows times width (dynamic batching), or `lengths` (packing).
        costs: of the sequences as wide as they are computed, by the planned `SequenceCost`, in its unit.
    """

    rows: list[list[list[int]]]
    lengths: list[list[int]]
    tokens: list[list[int]]
    slots: list[list[int]]
    costs: list[list[float]]

    @property
    def efficiency(self) -> float:
        """Tokens per token position computed, over all shards: 1 without padding."""
        slots = sum(chain.from_iterable(self.slots))
        return sum(chain.from_iterable(self.tokens)) / slots if slots else 1.0

    @property
    def shard_imbalance(self) -> float:
        """By how much the costliest shard exceeds the mean of the shards: 0.02 makes an optimizer step 2 % longer than
        it had to be."""
        return imbalance([sum(shard) for shard in self.costs])

    @property
    def microbatch_imbalance(self) -> float:
        """The same among the k-th microbatches of all shards, for the worst k: what shards wait for each other that
        meet in every microbatch, as those that share a model's experts do."""
        return max(map(imbalance, zip(*self.costs, strict=True)), default=0.0)


def plan_padded(
    lengths: Sequence[int], width: int, num_shards: int, rows_per_microbatch: int, cost: SequenceCost
) -> MicrobatchPlan:
    """Neighbouring rows on one shard, in order, so many at a time, all `width` tokens wide.

    Raises:
        ValueError: the rows do not divide over shards and microbatches.
    """
    num_rows = len(lengths)
    if num_rows % (num_shards * rows_per_microbatch):
        raise ValueError(
            f"{num_rows} rows do not divide over {num_shards} shards in microbatches of {rows_per_microbatch}: append "
            f"zero-weight rows with `pad_to_multiple({num_shards * rows_per_microbatch})`."
        )
    share = num_rows // num_shards
    rows = [
        [list(range(start, start + rows_per_microbatch)) for start in range(first, first + share, rows_per_microbatch)]
        for first in range(0, num_rows, share)
    ]
    return MicrobatchPlan(
        rows,
        lengths=[[width] * len(shard) for shard in rows],
        tokens=_sums(rows, lengths),
        slots=[[rows_per_microbatch * width] * len(shard) for shard in rows],
        costs=[[rows_per_microbatch * cost(width)] * len(shard) for shard in rows],
    )


def plan_dynamic_batching(
    lengths: Sequence[int], width: int, num_shards: int, args: DynamicBatchingArgs
) -> MicrobatchPlan:
    """Sort the units by length and deal them out, there and back, so that place k holds units of like length on every
    shard and the shards have about as many tokens; then cut all shards at the same places wherever the next unit would
    exceed the budget. All shards compute the same shapes: the plan's imbalance is 0, whatever the cost.

    Args:
        lengths: tokens of each row.
        width: S, the width of the rows: rounding a length up never exceeds it.

    Raises:
        ValueError: the rows do not divide over the shards in whole units, or one unit alone exceeds the budget.
    """
    num_units = _num_units(len(lengths), num_shards, args)
    unit_lengths = [max(lengths[row] for row in _rows_of(unit, args)) for unit in range(num_units)]
    order = sorted(range(num_units), key=unit_lengths.__getitem__)
    places = [order[start : start + num_shards] for start in range(0, num_units, num_shards)]
    longest = [place[-1] for place in places]
    for place in places[1::2]:
        place.reverse()

    cuts: list[list[list[int]]] = []  # microbatch → places → one unit per shard
    cut_lengths: list[int] = []
    for place, unit in zip(places, longest, strict=True):
        length = min(round_up(unit_lengths[unit], args.sequence_length_round), width)
        if length * args.unit_size > args.max_tokens_per_microbatch:
            raise ValueError(
                f"row {unit * args.unit_size} needs {args.unit_size} x {length} tokens (rounded up to "
                f"{args.sequence_length_round}) and max_tokens_per_microbatch is {args.max_tokens_per_microbatch}: "
                f"raise it to at least {length * args.unit_size} or shorten the sequences."
            )
        fits = cuts and (len(cuts[-1]) + 1) * args.unit_size * length <= args.max_tokens_per_microbatch
        if fits:  # units come in order of length, so this one is the longest so far
            cuts[-1].append(place)
            cut_lengths[-1] = length
        else:
            cuts.append([place])
            cut_lengths.append(length)
    rows = [
        [list(chain.from_iterable(_rows_of(place[shard], args) for place in cut)) for cut in cuts]
        for shard in range(num_shards)
    ]
    shapes = [(len(cut) * args.unit_size, length) for cut, length in zip(cuts, cut_lengths, strict=True)]
    return MicrobatchPlan(
        rows,
        lengths=[list(cut_lengths) for _ in rows],
        tokens=_sums(rows, lengths),
        slots=[[num_rows * length for num_rows, length in shapes] for _ in rows],
        costs=[[num_rows * args.cost(length) for num_rows, length in shapes] for _ in rows],
    )


def plan_sequence_packing(
    lengths: Sequence[int], num_shards: int, args: SequencePackingArgs, allow_uneven: bool = False
) -> MicrobatchPlan:
    """Pack the units into as many packs for every shard, and deal the packs out so that the shards' k-th microbatches
    and their sums are of like cost. Every shard begins with its costliest.

    Raises:
        ValueError: rows that do not divide over the shards (unless `allow_uneven`), fewer units than shards, or a unit
            that exceeds the budget.
    """
    num_units = _num_units(len(lengths), 1 if allow_uneven else num_shards, args)
    padded = [round_up(length, args.sequence_length_pad_multiple) for length in lengths]
    costs = [args.cost(length) for length in padded]
    units = Units(
        lengths=[sum(padded[row] for row in _rows_of(unit, args)) for unit in range(num_units)],
        costs=[sum(costs[row] for row in _rows_of(unit, args)) for unit in range(num_units)],
        capacity=args.max_tokens_per_microbatch,
    )
    shards = _pack(units, num_shards, args.algorithm)
    rows = [[list(chain.from_iterable(_rows_of(unit, args) for unit in pack)) for pack in shard] for shard in shards]
    slots = _sums(rows, padded)
    return MicrobatchPlan(rows, lengths=slots, tokens=_sums(rows, lengths), slots=slots, costs=_sums(rows, costs))


def _pack(units: Units, num_shards: int, algorithm: str) -> list[Packs]:
    if algorithm == "balanced":
        return balanced_shards(units, num_shards)
    packs = pack_sequences(units.lengths, units.capacity, algorithm)
    return deal(units, split_packs(packs, units.lengths, round_up(len(packs), num_shards)), num_shards)


def _sums(rows: list[list[list[int]]], values: Sequence[float]) -> list[list[float]]:
    """The sum of the rows' values in every microbatch of every shard."""
    return [[sum(values[row] for row in microbatch) for microbatch in shard] for shard in rows]


def _num_units(num_rows: int, num_shards: int, args: _MicrobatchArgs) -> int:
    multiple = num_shards * args.unit_size
    if num_rows % multiple:
        raise ValueError(
            f"{num_rows} rows do not divide over {num_shards} shards in units of {args.unit_size}: append zero-weight "
            f"rows with `pad_to_multiple({multiple})`."
        )
    return num_rows // args.unit_size


def _rows_of(unit: int, args: _MicrobatchArgs) -> range:
    return range(unit * args.unit_size, (unit + 1) * args.unit_size)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is no less than `value`."""
    return -(-value // multiple) * multiple

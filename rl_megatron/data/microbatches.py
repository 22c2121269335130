"""Which rows form which microbatch on which shard, decided for all shards at once.

Ranks that chose their own microbatches would disagree on how many there are and wait for each other for ever. So both
plans here give every shard the same number of microbatches: dynamic batching by cutting all shards at the same
positions, sequence packing by splitting packs until they divide over the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Self

from rl_megatron.config.errors import unknown_name
from rl_megatron.data.packing import pack_sequences, split_packs


@dataclass(frozen=True)
class _MicrobatchArgs:
    max_tokens_per_microbatch: int
    input_key: str = "input_ids"
    input_lengths_key: str = "input_lengths"
    unit_size: int = 1

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
        return cls(**args)


@dataclass(frozen=True)
class DynamicBatchingArgs(_MicrobatchArgs):
    """Microbatches of rows of like length, each cut to its longest row: rows x length stays within the budget.

    Attributes:
        max_tokens_per_microbatch: rows times padded length of one microbatch, at most.
        input_key: the key of the `[B, S]` token ids.
        input_lengths_key: the key of the `[B]` lengths.
        unit_size: rows that stay together, in order: 2 for preference pairs.
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
        algorithm: a key of `rl_megatron.data.packing.ALGORITHMS`.
        sequence_length_pad_multiple: each sequence's length in the pack is a multiple of this (2·cp, times tp under
            sequence parallelism).
    """

    algorithm: str = "modified_first_fit_decreasing"
    sequence_length_pad_multiple: int = 1


@dataclass(frozen=True)
class MicrobatchPlan:
    """Microbatches of one chunk.

    Attributes:
        rows: `rows[shard][microbatch]`: row numbers, counted from the chunk's first.
        lengths: `lengths[shard][microbatch]`: width to cut to (dynamic batching) or tokens in all (packing).
    """

    rows: list[list[list[int]]]
    lengths: list[list[int]]


def plan_dynamic_batching(
    lengths: Sequence[int], width: int, num_shards: int, args: DynamicBatchingArgs
) -> MicrobatchPlan:
    """Sort the units by length and deal them out, so that place k holds units of like length on every shard; then cut
    all shards at the same places wherever the next unit would exceed the budget.

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

    cuts: list[list[list[int]]] = []  # microbatch → places → one unit per shard
    cut_lengths: list[int] = []
    for place in places:
        length = min(_round_up(unit_lengths[place[-1]], args.sequence_length_round), width)
        if length * args.unit_size > args.max_tokens_per_microbatch:
            raise ValueError(
                f"row {place[-1] * args.unit_size} needs {args.unit_size} x {length} tokens (rounded up to "
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
    return MicrobatchPlan(rows, [list(cut_lengths) for _ in range(num_shards)])


def plan_sequence_packing(
    lengths: Sequence[int], num_shards: int, args: SequencePackingArgs, allow_uneven: bool = False
) -> MicrobatchPlan:
    """Pack the units, split packs until they divide over the shards, and deal them out from the fullest on, there and
    back, so that the shards' k-th microbatches and their sums are of like size.

    Raises:
        ValueError: rows that do not divide over the shards (unless `allow_uneven`), fewer units than shards, or a unit
            that exceeds the budget.
    """
    num_units = _num_units(len(lengths), 1 if allow_uneven else num_shards, args)
    padded = [_round_up(length, args.sequence_length_pad_multiple) for length in lengths]
    unit_lengths = [sum(padded[row] for row in _rows_of(unit, args)) for unit in range(num_units)]
    packs = pack_sequences(unit_lengths, args.max_tokens_per_microbatch, args.algorithm)
    packs = split_packs(packs, unit_lengths, _round_up(len(packs), num_shards))
    packs.sort(key=lambda pack: -sum(unit_lengths[unit] for unit in pack))
    rows: list[list[list[int]]] = [[] for _ in range(num_shards)]
    for number, pack in enumerate(packs):
        turn, place = divmod(number, num_shards)
        shard = place if turn % 2 == 0 else num_shards - 1 - place
        rows[shard].append(list(chain.from_iterable(_rows_of(unit, args) for unit in pack)))
    return MicrobatchPlan(rows, [[sum(padded[row] for row in pack) for pack in shard] for shard in rows])


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


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

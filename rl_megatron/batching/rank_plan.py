"""Plan the microbatches of several ranks at once, from the lengths of their sequences.

All ranks need the same number of microbatches, or their collectives would hang. Microbatches should also have similar
costs. So every rank makes the same plan for all ranks that share the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from rl_megatron.batching.config import Batching, DynamicPlanArgs, PackingPlanArgs, require_count
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.microbatch import Microbatch
from rl_megatron.batching.microbatch_plan import (
    MicrobatchPlan,
    plan_dynamic_batching,
    plan_padded,
    plan_sequence_packing,
    require_within_width,
)
from rl_megatron.batching.packing import round_up
from rl_megatron.batching.shared_prefixes import SharedPrefixes
from rl_megatron.batching.tree_plan import plan_trees
from rl_megatron.config.errors import ConfigError, nearest
from rl_megatron.topology.degrees import SequenceLayout, zigzag_slices


@dataclass(frozen=True)
class RankPlan:
    """The microbatches of this data-parallel rank; every rank has the same number of them.

    Attributes:
        microbatches: In the order in which they run.
        efficiency: All ranks' tokens per token slot that the model computes; above 1 if sequences share tokens.
            Microbatches of zero weight, which an interleaved pipeline may add, do not count.
    """

    microbatches: list[Microbatch]
    efficiency: float


@dataclass(frozen=True)
class LengthPlan:
    """A plan of microbatches from the lengths of sequences alone.

    Attributes:
        lengths: The number of tokens (at least 1) of each sequence, and then of each padding sequence.
        plan: Which sequences form which microbatch of which shard.
        tokens: Tokens of all sequences, without padding.
        slots: Tokens that the model computes, padding included, but shared tokens once.
        shares_prefixes: Whether microbatches are packs in which sequences share tokens.
    """

    lengths: list[int]
    plan: MicrobatchPlan
    tokens: int
    slots: int
    shares_prefixes: bool = False

    @property
    def efficiency(self) -> float:
        """Return the number of tokens per token slot that the model computes; above 1 if sequences share tokens."""
        return self.tokens / self.slots


def plan_lengths(
    lengths: Sequence[int],
    width: int,
    batching: Batching,
    layout: SequenceLayout,
    num_shards: int,
    group_size: int = 1,
    cost: SequenceCost = SequenceCost(),
    prefixes: SharedPrefixes | None = None,
) -> LengthPlan:
    """Return the microbatches of sequences on `num_shards` data-parallel ranks.

    `width` is the padded length of the batch. `group_size` sequences stay together, in order: 2 for preference pairs.
    `cost` balances packs. `prefixes` has what the sequences have in common; None: nothing. ConfigError is raised if a
    group alone exceeds `batching.tokens`.
    """
    num_sequences = len(lengths)
    if not num_sequences:
        raise ValueError("there is no sequence to plan; a batch needs at least one")
    require_count("num_shards", num_shards)
    require_count("group_size", group_size)
    require_within_width(lengths, width)
    per_rank = -(-num_sequences // (num_shards * group_size)) * group_size
    per_microbatch = min(batching.sequences, per_rank)  # of padded batching
    multiple = num_shards * (per_microbatch if batching.kind == "padded" else group_size)
    size = round_up(num_sequences, multiple)
    padded = [max(length, 1) for length in lengths] + [1] * (size - num_sequences)
    try:
        plan = _plan_for_layout(batching, padded, width, layout, num_shards, per_microbatch, group_size, cost)
    except ValueError as error:
        raise ConfigError(
            f"train.batching={batching.kind}, train.micro_batch_tokens={batching.tokens}: {error}"
        ) from error
    trees = None
    if prefixes is not None:
        limit = batching if batching.kind != "padded" else replace(batching, tokens=per_microbatch * width)
        trees = plan_trees(padded, prefixes, num_shards, _packing_args(limit, layout, group_size, cost), plan)
    plan = trees or plan
    slots = sum(round_up(slots, layout.sequence_multiple) for slots in chain.from_iterable(plan.slots))
    return LengthPlan(padded, plan, sum(lengths), slots, trees is not None)


def _plan_for_layout(
    batching: Batching,
    lengths: list[int],
    width: int,
    layout: SequenceLayout,
    num_shards: int,
    sequences_per_microbatch: int,
    group_size: int,
    cost: SequenceCost,
) -> MicrobatchPlan:
    """Return the plan for all ranks. Its microbatches fit the budget even with the padding that the layout needs."""
    multiple = layout.sequence_multiple
    width = round_up(width, multiple)
    budget = batching.tokens // multiple * multiple
    if batching.kind == "padded":
        return plan_padded(lengths, width, num_shards, sequences_per_microbatch, cost)
    if batching.kind == "dynamic":
        dynamic = DynamicPlanArgs(budget, group_size=group_size, cost=cost, sequence_length_round=multiple)
        return plan_dynamic_batching(lengths, width, num_shards, dynamic)
    return plan_sequence_packing(lengths, num_shards, _packing_args(batching, layout, group_size, cost))


def _packing_args(batching: Batching, layout: SequenceLayout, group_size: int, cost: SequenceCost) -> PackingPlanArgs:
    multiple = layout.sequence_multiple
    return PackingPlanArgs(
        batching.tokens // multiple * multiple, group_size=group_size, cost=cost,
        sequence_length_pad_multiple=zigzag_slices(layout.context),
    )  # fmt: skip


def require_key(batch: Mapping[str, object], key: str) -> object:
    """Return batch[key], or raise a KeyError that names the nearest key of the batch."""
    if key not in batch:
        raise KeyError(f"the batch needs {key!r}{nearest(key, batch)}")
    return batch[key]


def _describe(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def sequence_lengths(batch: Mapping[str, Tensor]) -> list[int]:
    """Return the length of each sequence: its `input_lengths`, or the batch's width if there is no such key.

    Raises:
        KeyError: The batch has no `input_ids`.
        ValueError: The batch has no sequence or no token, a shape or dtype is wrong, a length is negative or exceeds
            the width, or `token_mask` is set past the end of a sequence.
    """
    ids = require_key(batch, "input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.dtype is torch.bool:
        raise ValueError(f"input_ids must be a tensor of integers [B, S], got {_describe(ids)}")
    num_sequences, width = ids.shape
    if not ids.numel():
        what = "sequence" if not num_sequences else "token"
        raise ValueError(f"the batch has no {what}: input_ids has the shape {(num_sequences, width)}")
    if "token_mask" in batch and batch["token_mask"].shape != ids.shape:
        raise ValueError(
            f"token_mask {tuple(batch['token_mask'].shape)} must have the shape of input_ids, {(num_sequences, width)}"
        )
    if "input_lengths" not in batch:
        return [width] * num_sequences
    lengths = batch["input_lengths"]
    whole = isinstance(lengths, Tensor) and not lengths.is_floating_point() and lengths.shape == (num_sequences,)
    if not whole:
        raise ValueError(
            f"input_lengths must be a tensor of integers, one for each of the {num_sequences} sequences, got "
            f"{_describe(lengths)}"
        )
    lengths = lengths.cpu()
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

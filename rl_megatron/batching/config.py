"""How sequences form microbatches: the user's choice, and the arguments of the planners."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Literal, Self, get_args

from rl_megatron.batching.cost import SequenceCost
from rl_megatron.batching.packing import ALGORITHMS
from rl_megatron.config.errors import unknown_name
from rl_megatron.config.train import TrainConfig

BatchingKind = Literal["padded", "dynamic", "packed"]

_PACKING = ("balanced", *ALGORITHMS)


def require_count(name: str, value: object) -> None:
    """Raise ValueError, which names the argument, unless `value` is a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be at least 1 and a whole number, got {value!r}.")


def check_groups(group_size: int, **values: Sized) -> None:
    """Raise ValueError unless all values, [B] or [B, …], have the same B, a multiple of `group_size`."""
    require_count("group_size", group_size)
    sizes = {name: len(value) for name, value in values.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{sizes} must have the same number of samples")
    for name, size in sizes.items():
        if size % group_size:
            raise ValueError(f"{size} {name} do not form groups of {group_size}")


@dataclass(frozen=True)
class Batching:
    """The choice of how sequences form microbatches.

    Attributes:
        kind: "padded": `sequences` sequences, padded to the width of the global batch. "dynamic": sequences of similar
            length, padded to the microbatch's longest. "packed": sequences concatenated into one pack.
        sequences: The number of sequences in a padded microbatch.
        tokens: The maximum number of tokens in a dynamic or packed microbatch, padding included.
        share_prefixes: Whether the model computes the common beginnings of sequences once, where that saves enough.

    Raises:
        ValueError: No kind has this name, or a number is not a whole number above 0.
    """

    kind: BatchingKind = "padded"
    sequences: int = 8
    tokens: int = 4096
    share_prefixes: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(BatchingKind):
            raise unknown_name("kind of batching", self.kind, get_args(BatchingKind))
        require_count("sequences", self.sequences)
        require_count("tokens", self.tokens)

    @classmethod
    def from_config(cls, train: TrainConfig) -> Self:
        return cls(
            train.batching, train.micro_batch_size, train.micro_batch_tokens,
            share_prefixes=train.share_prefixes == "auto",
        )  # fmt: skip


@dataclass(frozen=True)
class _TokenBudgetArgs:
    max_tokens_per_microbatch: int
    group_size: int = 1
    cost: SequenceCost = SequenceCost()

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in ("cost", "algorithm"):
                require_count(field.name, getattr(self, field.name))


@dataclass(frozen=True)
class DynamicPlanArgs(_TokenBudgetArgs):
    """Arguments of `plan_dynamic_batching`: microbatches of similar lengths, each as wide as its longest sequence.

    Attributes:
        max_tokens_per_microbatch: The maximum number of tokens in a microbatch: its sequences times its padded length.
        group_size: The number of neighbouring sequences that stay together, in order: 2 for preference pairs.
        cost: The cost of a sequence, for `MicrobatchPlan.costs`.
        sequence_length_round: Microbatch lengths are rounded up to a multiple of this, but not above the batch's width.
    """

    sequence_length_round: int = 1


@dataclass(frozen=True)
class PackingPlanArgs(_TokenBudgetArgs):
    """Arguments of `plan_sequence_packing`: microbatches that are packs of sequences.

    Attributes:
        max_tokens_per_microbatch: The maximum number of tokens in a pack, padding included.
        group_size: The number of neighbouring sequences that stay together, in order: 2 for preference pairs.
        cost: The cost of a sequence. "balanced" makes packs, and also shards, about equally costly.
        algorithm: "balanced" (few packs of equal cost, see `rl_megatron.batching.balance`), or a key of
            `rl_megatron.batching.packing.ALGORITHMS` (few packs).
        sequence_length_pad_multiple: Each sequence's length in the pack is a multiple of this (2·cp, times tp under
            sequence parallelism).

    Raises:
        ValueError: A number is below 1, or no algorithm has this name.
    """

    algorithm: str = "balanced"
    sequence_length_pad_multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm not in _PACKING:
            raise unknown_name("packing algorithm", self.algorithm, _PACKING)

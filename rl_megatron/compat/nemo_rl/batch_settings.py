"""The settings that NeMo RL's `shard_by_batch_size` takes, which are plain dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Required, TypedDict, TypeVar

from rl_megatron.batching.config import DynamicPlanArgs, PackingPlanArgs
from rl_megatron.batching.cost import SequenceCost
from rl_megatron.compat.nemo_rl.errors import RuleError
from rl_megatron.config.errors import unknown_name

_PlanArgs = TypeVar("_PlanArgs", DynamicPlanArgs, PackingPlanArgs)


class DynamicBatchingArgs(TypedDict, total=False):
    """Settings of dynamic batching: a microbatch has sequences of similar length, and is cut to the longest.

    Attributes:
        max_tokens_per_microbatch: The maximum number of tokens of a microbatch, padding included.
        sequence_length_round: A microbatch's width is rounded up to a multiple of this, but not above the batch's;
            default 1.
        input_key: The key of the `[B, S]` token ids; default "input_ids".
        input_lengths_key: The key of the `[B]` lengths; default "input_lengths".
        group_size: How many consecutive sequences stay together: 2 for preference pairs; default 1.
        cost: The cost of a sequence, for the plan's statistics; default: its number of tokens.
    """

    max_tokens_per_microbatch: Required[int]
    sequence_length_round: int
    input_key: str
    input_lengths_key: str
    group_size: int
    cost: SequenceCost


class SequencePackingArgs(TypedDict, total=False):
    """Settings of sequence packing: the sequences of a microbatch fit one packed row of the model.

    Attributes:
        max_tokens_per_microbatch: The maximum number of tokens of a pack, with each sequence's length rounded up.
        input_key: The key of the `[B, S]` token ids; default "input_ids".
        input_lengths_key: The key of the `[B]` lengths; default "input_lengths".
        algorithm: "balanced", the default, or a key of `rl_megatron.batching.packing.ALGORITHMS`.
        sequence_length_pad_multiple: Each sequence's length in the pack is rounded up to a multiple of this; default 1.
        microbatch_order: "packer", the default, keeps the plan's order; "largest_first" sorts each shard's microbatches
            by descending tokens, as in NeMo RL after 0.6.
        group_size: How many consecutive sequences stay together: 2 for preference pairs; default 1.
        cost: The cost of a sequence; default: its number of tokens. "balanced" evens out the costs of packs and shards.
    """

    max_tokens_per_microbatch: Required[int]
    input_key: str
    input_lengths_key: str
    algorithm: str
    sequence_length_pad_multiple: int
    microbatch_order: Literal["packer", "largest_first"] | None
    group_size: int
    cost: SequenceCost


def plan_args(settings: Mapping[str, Any], declared: type, arguments: type[_PlanArgs]) -> tuple[_PlanArgs, str, str]:
    """Return (arguments of the planner, key of the token ids, key of the lengths).

    `declared` is the TypedDict whose keys the caller's `settings` may have. Wrong keys and values raise RuleError.
    """
    declared_keys = declared.__annotations__
    try:
        for key in settings:
            if key not in declared_keys:
                raise unknown_name(f"key of {declared.__name__}", key, declared_keys)
        if "max_tokens_per_microbatch" not in settings:
            raise RuleError(
                f"{declared.__name__} needs the key 'max_tokens_per_microbatch'; it has {sorted(settings)}."
            )
        rest = dict(settings)
        keys = rest.pop("input_key", "input_ids"), rest.pop("input_lengths_key", "input_lengths")
        return arguments(**rest), *keys
    except ValueError as error:
        raise RuleError(f"{declared.__name__}: {error}") from error

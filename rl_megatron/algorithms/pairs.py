"""The requirements of algorithms that learn from preference pairs on their loss."""

from __future__ import annotations

from rl_megatron.algorithms.registry import LossNeeds
from rl_megatron.losses.contract import LossFunction, LossInputType

PAIR_KEYS = frozenset({"input_ids", "input_lengths", "token_mask", "sample_mask"})


def pair_loss(input_type: LossInputType, uses: str, choices: str, more_keys: frozenset[str] = frozenset()) -> LossNeeds:
    """Return the requirements of an algorithm whose loss compares the two answers of a pair.

    Args:
        input_type: The model output that the loss must read: logprobs of tokens, or scores.
        uses: The same in words, for messages.
        choices: The losses that suit, for messages.
        more_keys: Keys of the algorithm's batches besides those of every batch of pairs.
    """

    def suits(loss_fn: LossFunction) -> bool:
        return getattr(loss_fn, "group_size", 1) == 2 and loss_fn.input_type is input_type

    return LossNeeds(uses, suits, PAIR_KEYS | more_keys, choices)

"""Closed forms of the floating-point operations of the gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

from rl_megatron.config.model_shape import DeltaShape
from rl_megatron.model.layers.delta_rule import BLOCK


class DeltaFlops(NamedTuple):
    """The operations of the gated delta rule.

    Attributes:
        forward: Those of the forward pass.
        backward: Those of the backward pass.
        needed: Those of a forward pass that handles one token after the other, without blocks.
    """

    forward: int
    backward: int
    needed: int

    def times(self, layers: int) -> DeltaFlops:
        """Return the operations of several layers."""
        return DeltaFlops(*(layers * operations for operations in self))


NO_DELTA = DeltaFlops(0, 0, 0)


def delta_rule_flops(shape: DeltaShape, length: int) -> DeltaFlops:
    """Return the operations of the gated delta rule on a sequence, in blocks (`model/layers/delta_rule.py`).

    Args:
        shape: The dimensions of the rule.
        length: The tokens of the sequence.
    """
    block = min(BLOCK, length)
    blocks, key, value = -(-length // block), shape.key, shape.value
    scores = 4 * block**2 * key + shape.values * 2 * block**2 * value  # of keys and queries with keys, and with values
    solve = shape.values * block**2 * (key + value)
    with_memory = shape.values * 2 * block * key * value  # each of: corrected for it, written to it, read from it
    # The backward pass needs no gradient of the first memory, and none of what is written to the last one.
    backward = (6 * blocks - 3 if blocks > 1 else 2) * with_memory
    return DeltaFlops(
        shape.groups * blocks * (scores + solve + 3 * with_memory),
        shape.groups * (blocks * (2 * scores + 3 * solve) + backward),
        shape.groups * length * shape.values * 6 * key * value,
    )

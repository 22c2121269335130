"""Closed forms of the floating-point operations of the gated delta rule."""

from __future__ import annotations

from typing import NamedTuple

from rl_megatron.config.model_shape import DeltaShape
from rl_megatron.model.layers.delta_rule import CHUNK


class DeltaFlops(NamedTuple):
    """The operations of the gated delta rule.

    Attributes:
        forward: Those of the forward pass.
        backward: Those of the backward pass.
        needed: Those of a forward pass that handles one token after the other, without chunks.
    """

    forward: int
    backward: int
    needed: int

    def times(self, layers: int) -> DeltaFlops:
        """Return the operations of several layers."""
        return DeltaFlops(*(layers * operations for operations in self))


NO_DELTA = DeltaFlops(0, 0, 0)


def delta_rule_flops(shape: DeltaShape, length: int) -> DeltaFlops:
    """Return the operations of the gated delta rule on a sequence, in chunks (`model/layers/delta_rule.py`).

    Args:
        shape: The dimensions of the rule.
        length: The tokens of the sequence.
    """
    chunk = min(CHUNK, length)
    chunks, key, value = -(-length // chunk), shape.key, shape.value
    scores = 4 * chunk**2 * key + shape.values * 2 * chunk**2 * value  # of keys and queries with keys, and with values
    solve = shape.values * chunk**2 * (key + value)
    with_memory = shape.values * 2 * chunk * key * value  # each of: corrected for it, written to it, read from it
    # The backward pass needs no gradient of the first memory, and none of what is written to the last one.
    backward = (6 * chunks - 3 if chunks > 1 else 2) * with_memory
    return DeltaFlops(
        shape.groups * chunks * (scores + solve + 3 * with_memory),
        shape.groups * (chunks * (2 * scores + 3 * solve) + backward),
        shape.groups * length * shape.values * 6 * key * value,
    )

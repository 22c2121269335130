"""Dropout of adapters that depends only on a seed, and not on random numbers drawn before.

So a layout with the same microbatches as a single process drops the same elements, except under context parallelism. A
microbatch's seed is stored in megatron-core's RNG tracker, because the recomputation of activations restores the
tracker's states, in whatever order the pipeline runs the microbatches.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

_STATE = "adapter-dropout"


def seed_microbatch(seed: int, device: torch.device) -> None:
    """Set the seed of the microbatch whose forward pass begins."""
    tracker: Any = get_cuda_rng_tracker()  # its class is megatron-core's or Transformer Engine's
    tracker.set_states(tracker.get_states() | {_STATE: torch.Generator(device).manual_seed(seed).get_state()})


def get_microbatch_seed(device: torch.device) -> int:
    """Return the seed of the microbatch whose forward pass or recomputation is running."""
    tracker: Any = get_cuda_rng_tracker()
    generator = torch.Generator(device)
    generator.set_state(tracker.get_states()[_STATE])
    return generator.initial_seed()


def dropout(x: Tensor, p: float, seed: int, axis: int = 0, shards: int = 1, shard: int = 0) -> Tensor:
    """Return x with each element set to 0 with probability `p`, and all others divided by 1 − p.

    Args:
        x: Part `shard`, counted from 0, of a tensor that is cut into `shards` equal parts along `axis`.
        p: The probability.
        seed: The seed and the shape of the whole tensor determine which of its elements are dropped.
        axis: The axis.
        shards: The number of parts.
        shard: The number of this part.
    """
    shape, size = list(x.shape), x.size(axis)
    shape[axis] = shards * size
    generator = torch.Generator(x.device).manual_seed(seed)
    kept = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p, generator=generator)
    return x * kept.narrow(axis, shard * size, size) / (1 - p)

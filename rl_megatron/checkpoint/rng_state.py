"""Saving and restoring the random number generators of one rank: torch's, the GPU's and megatron-core's.

Initial weights, data order and samples are functions of seeds and step numbers, and do not use these generators. They
matter only to user code that draws from them, such as a reward that samples. They are not restored under another
layout, and only torch's are restored on another kind of device.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def serialise_random_state() -> bytes:
    """Return the serialized state of this rank's generators."""
    tracker: Any = get_cuda_rng_tracker()  # its class is megatron-core's or Transformer Engine's
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "megatron": tracker.get_states()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def restore_random_state(saved: bytes) -> None:
    """Restore this rank's generators from the bytes that `serialise_random_state` returned."""
    state = torch.load(io.BytesIO(saved), weights_only=True)
    torch.set_rng_state(state["cpu"])
    if ("cuda" in state) != torch.cuda.is_initialized():
        return  # states of a GPU's and a CPU's generators, including megatron-core's, do not fit each other
    tracker: Any = get_cuda_rng_tracker()
    tracker.set_states(state["megatron"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])

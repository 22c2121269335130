"""The random number generators of one rank: torch's, the GPU's, and those that megatron-core keeps for it.

Weights, data order and samples are functions of seeds and step numbers and draw from none of these. They are for what
does: dropout in a model of one's own, a reward that samples. Under another layout they mean nothing and begin anew.
"""

from __future__ import annotations

import io
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def random_state_file(rank: int) -> str:
    return f"random_{rank:05d}.pt"


def random_state() -> bytes:
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "megatron": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def restore_random_state(saved: bytes) -> None:
    state = torch.load(io.BytesIO(saved), weights_only=True)
    torch.set_rng_state(state["cpu"])
    get_cuda_rng_tracker().set_states(state["megatron"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])

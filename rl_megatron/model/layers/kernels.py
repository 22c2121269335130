"""The choice of kernels for parts of a layer."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from rl_megatron import log


def triton_layers(device: torch.device) -> ModuleType | None:
    """Return the kernels in Triton for a GPU, or None if it is not installed, or on a CPU."""
    return _triton_layers() if device.type == "cuda" else None


@cache
def _triton_layers() -> ModuleType | None:
    try:
        from rl_megatron.model.layers import triton_layers as module
    except ModuleNotFoundError:
        log.once("Triton is not installed, so torch computes RoPE and SwiGLU, in more passes; `pip install triton`.")
        return None
    return module

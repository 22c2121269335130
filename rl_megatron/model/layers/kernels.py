"""The choice of kernels for RoPE and SwiGLU: Triton's on a GPU, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rl_megatron import log


@dataclass(frozen=True)
class LayerKernels:
    """The functions of `triton_layers.py`."""

    turn_heads: Callable[[Tensor, Sequence[Tensor], Tensor, bool, bool], None]
    gated_silu: Callable[[Tensor], Tensor]
    gated_silu_gradient: Callable[[Tensor, Tensor], Tensor]


def find_layer_kernels(device: torch.device) -> LayerKernels | None:
    """Return the kernels for tensors on that device, or None if torch's operators compute RoPE and SwiGLU there."""
    return _triton() if device.type == "cuda" else None


@cache
def _triton() -> LayerKernels | None:
    try:
        from rl_megatron.model.layers import triton_layers
    except ModuleNotFoundError:
        log.once("Triton is not installed, so torch computes RoPE and SwiGLU in more passes; run `pip install triton`.")
        return None
    return LayerKernels(triton_layers.turn_heads, triton_layers.gated_silu, triton_layers.gated_silu_gradient)

"""The choice of kernels for RoPE and SwiGLU: Triton's on a GPU, stand-ins on one that is planned, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rl_megatron import log
from rl_megatron.topology.fake_cuda import is_planned, launched


@dataclass(frozen=True)
class LayerKernels:
    """The functions of `triton_layers.py`."""

    turn_heads: Callable[[Tensor, Sequence[Tensor], Tensor, bool, bool], None]
    gated_silu: Callable[[Tensor], Tensor]
    gated_silu_gradient: Callable[[Tensor, Tensor], Tensor]


def layer_kernels(device: torch.device) -> LayerKernels | None:
    """Return the kernels for tensors on that device, or None if torch's operators compute RoPE and SwiGLU there."""
    if device.type != "cuda":
        return None
    return _PLAN if is_planned() else _triton()


@cache
def _triton() -> LayerKernels | None:
    try:
        from rl_megatron.model.layers import triton_layers
    except ModuleNotFoundError:
        log.once("Triton is not installed, so torch computes RoPE and SwiGLU, in more passes; `pip install triton`.")
        return None
    return LayerKernels(triton_layers.turn_heads, triton_layers.gated_silu, triton_layers.gated_silu_gradient)


def _plan_turns(mixed: Tensor, parts: Sequence[Tensor], turns: Tensor, interleaved: bool, back: bool) -> None:
    launched(torch.ops.aten.mul.Tensor, (mixed, turns), mixed if back else parts[0])


def _plan_silu(both: Tensor) -> Tensor:
    out = both.new_empty(*both.shape[:-1], both.size(-1) // 2)
    return launched(torch.ops.aten.silu.default, (both,), out)


def _plan_silu_gradient(both: Tensor, gradient: Tensor) -> Tensor:
    return launched(torch.ops.aten.silu_backward.default, (both, gradient), torch.empty_like(both))


_PLAN = LayerKernels(_plan_turns, _plan_silu, _plan_silu_gradient)

"""The gated activation of MLPs, activation(gate)·up, without a copy of either half of its input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import gelu, silu

from rl_megatron.model.layers.kernels import find_layer_kernels

# Functions of the gate, by the value of model.activation. "swiglu_oai" is not a function of the gate alone.
ACTIVATIONS = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh")}
_GRADIENTS: dict[str, Callable[..., Tensor]] = {
    "silu": torch.ops.aten.silu_backward.grad_input,
    "gelu_tanh": partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
}
# gpt-oss has these numbers in all its models.
_SLOPE, _LIMIT = 1.702, 7.0


class GatedActivation(MegatronModule):
    """The activation [..., 2·F] → [..., F] between the two linears of an MLP. Its input is gate and up, side by side.

    The result is activation(gate)·up or, for "swiglu_oai", g·sigmoid(1.702·g)·(u + 1) with g = min(gate, 7) and u = up
    clamped to ±7 (gpt-oss).

    Args:
        config: megatron-core's config.
        activation: The value of model.activation.
    """

    def __init__(self, config: TransformerConfig, activation: str):
        super().__init__(config)
        self.activation = activation

    def forward(self, both: Tensor) -> Tensor:
        """Return the activation of gate and up."""
        if self.activation == "swiglu_oai":
            return _ClampedSwiGLU.apply(both)
        return _GatedActivation.apply(both, self.activation)


def computes_again(device: torch.device) -> bool:
    """Return whether backward computes the activation again instead of keeping it; the numbers are the same.

    On a GPU this takes little time and saves a third of an MLP's activation memory. On a CPU it takes longer.
    """
    return device.type != "cpu"


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both: Tensor, activation: str) -> Tensor:
        ctx.activation = activation
        if activation == "silu" and (kernels := find_layer_kernels(both.device)) is not None:
            ctx.save_for_backward(both)
            return kernels.gated_silu(both)
        gate, up = both.chunk(2, dim=-1)
        activated = ACTIVATIONS[activation](gate)
        if computes_again(both.device):
            ctx.save_for_backward(both)
            return activated.mul_(up)  # in place, to avoid a third tensor of this size
        ctx.save_for_backward(both, activated)
        return activated * up

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        both, *kept = ctx.saved_tensors
        if ctx.activation == "silu" and (kernels := find_layer_kernels(both.device)) is not None:
            return kernels.gated_silu_gradient(both, gradient), None
        gate, up = both.chunk(2, dim=-1)
        activated = kept[0] if kept else ACTIVATIONS[ctx.activation](gate)
        result = torch.empty_like(both)
        gate_gradient, up_gradient = result.chunk(2, dim=-1)
        torch.mul(gradient, up, out=up_gradient)  # up_gradient is scratch here
        _GRADIENTS[ctx.activation](up_gradient, gate, grad_input=gate_gradient)
        torch.mul(gradient, activated, out=up_gradient)
        return result, None


class _ClampedSwiGLU(torch.autograd.Function):
    """The activation of gpt-oss. Backward computes it again from its input."""

    @staticmethod
    def forward(ctx, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        gate, up = _clamp(both)
        return (up + 1) * (gate * torch.sigmoid(gate * _SLOPE))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        (both,) = ctx.saved_tensors
        gate, up = _clamp(both)
        opened = torch.sigmoid(gate * _SLOPE)
        gate_gradient = gradient * (up + 1) * opened * (1 + _SLOPE * gate * (1 - opened))
        raw_gate, raw_up = both.chunk(2, dim=-1)
        gate_gradient = gate_gradient.masked_fill_(raw_gate > _LIMIT, 0.0)
        up_gradient = (gradient * gate * opened).masked_fill_(raw_up.abs() > _LIMIT, 0.0)
        return torch.cat([gate_gradient, up_gradient], dim=-1)


def _clamp(both: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = both.chunk(2, dim=-1)
    return gate.clamp(max=_LIMIT), up.clamp(min=-_LIMIT, max=_LIMIT)

"""RMSNorm on plain torch, and the residual connection of layers that also normalise the output of attention and MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import rms_norm


class PortableRMSNorm(torch.nn.RMSNorm):
    """The norm y = x / sqrt(mean(x²) + ε) · w, or · (1 + w) if the config's norms are zero-centred.

    It is accumulated in fp32. Under sequence parallelism the weight's gradient is marked for the all-reduce over the
    tensor-parallel ranks, because each of them saw only its own part of the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.zero_centered = config.layernorm_zero_centered_gamma
        # megatron-core reads this mark from the parameter.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed `x` in its own dtype."""
        if not self.zero_centered:
            return apply_rms_norm(x, self.weight, self.eps)
        # In bf16, 1 + w would lose most digits of w. The sum and the product are fp32, as in Gemma's own code.
        return apply_rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).type_as(x)


def apply_rms_norm(x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    """Return torch's rms_norm over the last dimension. torch computes it in one kernel on a GPU, but not on a CPU."""
    if x.device.type != "cpu":
        return rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """The norm on a CPU. Its forward equals torch's bit for bit, and its backward needs half as many passes."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float | None) -> Tensor:
        wide = x.float() if x.dtype is not torch.float64 else x
        scratch = wide.square()
        inverse = scratch.mean(-1, keepdim=True).add_(torch.finfo(wide.dtype).eps if eps is None else eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return torch.mul(wide, inverse, out=scratch).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return dx = r·(g·w − x·r²·mean(g·w·x)) and dw = Σ g·x·r, with r = 1 / sqrt(mean(x²) + ε)."""
        x, weight, inverse = ctx.saved_tensors
        wide, wide_weight, upstream = (t.to(inverse.dtype) for t in (x, weight, gradient))
        scratch = upstream * wide
        weight_gradient = inverse.view(1, -1) @ scratch.view(-1, len(weight))
        share = (scratch @ wide_weight)[..., None].mul_(inverse.square()).div_(len(weight))
        torch.mul(upstream, wide_weight, out=scratch).addcmul_(wide, share, value=-1).mul_(inverse)
        return scratch.to(x.dtype), weight_gradient[0].to(weight.dtype), None


class NormedResidual(torch.nn.Module):
    """The residual connection residual + norm(x), in which x is the output of attention or MLP (Gemma 2 and 3).

    It replaces megatron-core's bias-dropout-add.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.norm = PortableRMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """Return a function of (output and bias, residual, dropout), which megatron-core calls."""

        def add(output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
            return residual + self.norm(output_and_bias[0])

        return add

"""Weight gradients that linears add to the fp32 gradient buffer within the matrix product, without rounding to bf16."""

from __future__ import annotations

from megatron.core.tensor_parallel import layers
from torch import Tensor

from rl_megatron.logprobs.linear import add_weight_gradient
from rl_megatron.topology.topology import Topology


class _MatrixProduct:
    """torch's matrix product in the place of Apex's module `fused_weight_gradient_mlp_cuda`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(hidden: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
        """Add the weight's gradient to `main_grad`. The input is [T, in], and the gradient of the output [T, out]."""
        add_weight_gradient(main_grad, gradient, hidden)


def fuse_weight_gradients(topology: Topology) -> bool:
    """Return whether linears add weight gradients to the gradient buffer, and prepare megatron-core for it.

    On a GPU they do, because otherwise backward would round each microbatch's gradient to bf16, and DDP would add it in
    a second pass. Transformer Engine's layers use their own matrix product for it, and megatron-core's use Apex's, or
    torch's if Apex is not installed. Without DDP's gradient buffers, the backward pass of such a model fails.
    """
    if not topology.is_cuda:
        return False
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _MatrixProduct
        layers._grad_accum_fusion_available = True
    return True

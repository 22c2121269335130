"""Matrix products that add weight gradients to the fp32 gradient buffer directly, without rounding them to bf16."""

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
    """Return whether matrix products add weight gradients to the gradient buffer; if so, enable this in megatron-core.

    They do on a GPU: otherwise backward would round each microbatch's gradient to bf16, and DDP would add it in a
    second pass. Transformer Engine's layers use their own matrix product, and megatron-core's use Apex's, or torch's if
    Apex is not installed. The backward pass of such a model fails without DDP's gradient buffers.
    """
    if not topology.is_cuda:
        return False
    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = _MatrixProduct
        layers._grad_accum_fusion_available = True
    return True

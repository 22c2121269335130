"""The variants of mode fused, from hidden states and weight to logprobs, and the matrix products alone."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from benchmarks.logprobs.cases import Problem
from benchmarks.logprobs.variants import Outputs, Variant
from rl_megatron.logprobs import linear_logprobs, vocab_parallel_logprobs

_CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}  # 32 MiB and 512 MiB in bf16


def block_tokens(weight: Tensor) -> int:
    """Return the rows of a token block, as `linear_logprobs` chooses them, so that the products alone have the same."""
    tokens = _CHUNK_LOGITS[weight.device.type] // len(weight)
    return max(1, tokens) if weight.device.type == "cpu" else max(1024, tokens // 1024 * 1024)


def fused_variants(device: torch.device) -> list[Variant]:
    """Return the variants of mode fused, ours first."""
    variants = [
        Variant("rl_megatron linear_logprobs", _linear, ("fused",), is_ours=True),
        Variant("its products alone", _products, ("fused",), is_products=True),
        Variant("matmul, rl_megatron", _matmul_ours, ("fused",)),
        Variant("matmul, torch log_softmax", _matmul_plain, ("fused",), any_tensor=False),
    ]
    if device.type == "cuda":
        if importlib.util.find_spec("cut_cross_entropy"):
            variants.append(Variant("cut-cross-entropy", _cut_cross_entropy, ("fused",), any_tensor=False))
        if importlib.util.find_spec("liger_kernel"):
            variants.append(Variant("Liger fused linear, summed", _liger, ("fused",), any_tensor=False))
    return variants


def _linear(problem: Problem, hidden: Tensor, weight: Tensor) -> Outputs:
    stats = linear_logprobs(hidden, weight, problem.targets, problem.group, block_tokens=block_tokens(weight))
    return (stats.logprobs,)


def _matmul_ours(problem: Problem, hidden: Tensor, weight: Tensor) -> Outputs:
    from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

    if problem.case.tensor > 1:
        hidden = copy_to_tensor_model_parallel_region(hidden, problem.group)
    return (vocab_parallel_logprobs(hidden @ weight.T, problem.targets, problem.group).logprobs,)


def _matmul_plain(problem: Problem, hidden: Tensor, weight: Tensor) -> Outputs:
    log_p = (hidden @ weight.T).float().log_softmax(-1)
    return (log_p.gather(1, problem.targets[:, None])[:, 0],)


def _cut_cross_entropy(problem: Problem, hidden: Tensor, weight: Tensor) -> Outputs:
    from cut_cross_entropy import linear_cross_entropy

    # Without its filter, which drops small gradients.
    return (-linear_cross_entropy(hidden, weight, problem.targets, reduction="none", filter_eps=None),)


def _liger(problem: Problem, hidden: Tensor, weight: Tensor) -> Outputs:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return (-LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, problem.targets),)


def _products(problem: Problem, hidden: Tensor, weight: Tensor) -> Outputs:
    return (_Products.apply(hidden, weight, block_tokens(weight)),)


class _Products(torch.autograd.Function):
    """The matrix products of `linear_logprobs` and nothing else.

    Forward computes logits block by block. Backward computes all but the last block again, and both gradients; the
    weight's gradient is summed in fp32. A CPU has no matrix product of 16-bit factors with an fp32 sum, so it
    multiplies fp32 zeros instead.
    """

    @staticmethod
    def forward(ctx, hidden, weight, rows):
        blocks = hidden.split(rows)
        for block in blocks:
            logits = block @ weight.T
        ctx.save_for_backward(hidden, weight, logits)
        ctx.rows = rows
        return hidden.new_zeros(len(hidden), dtype=torch.float32)

    @staticmethod
    def backward(ctx, _):
        hidden, weight, logits = ctx.saved_tensors
        hidden_grad, blocks = torch.empty_like(hidden), hidden.split(ctx.rows)
        pairs = list(zip(blocks, hidden_grad.split(ctx.rows), strict=True))
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        zeros = None
        if not hidden.is_cuda and weight.dtype != torch.float32:
            zeros = weight_grad.new_zeros(ctx.rows, len(weight)), weight_grad.new_zeros(ctx.rows, weight.shape[1])
        for index, (block, chunk_grad) in enumerate(reversed(pairs)):
            if index:
                logits = block @ weight.T
            torch.mm(logits, weight, out=chunk_grad)
            if zeros is not None:
                weight_grad.addmm_(zeros[0][: len(block)].T, zeros[1][: len(block)])
            elif weight.dtype != torch.float32:
                torch.addmm(weight_grad, logits.T, block, out_dtype=torch.float32, out=weight_grad)
            else:
                weight_grad.addmm_(logits.T, block)
        return hidden_grad, weight_grad.to(weight.dtype), None

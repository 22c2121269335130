"""The gated delta rule: a memory of fixed size per head, which each token corrects and reads.

With a matrix S [key, value] that begins as 0, a token with query q, key k, value v, decay α and strength β computes

    S ← α·S + k·(β·(v − α·Sᵀk))ᵀ        o = Sᵀq

The token replaces the value that the memory returns for the key k by a mixture of that value and v. All tokens of a
block are computed together. Let γ_i be the product of the decays from the block's start to token i, and S the memory at
the block's start. The corrections U of the block's tokens solve

    (I + L)·U = β·V − (β·γ·K)·S         L_ij = β_i·(γ_i/γ_j)·(k_i·k_j)  for j < i

Source: Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

BLOCK = 64  # tokens that are computed together
_EPSILON = 1e-6  # added to the squared length of a query or key


class DeltaStates(NamedTuple):
    """The state that a sequence's next token needs from earlier tokens.

    Attributes:
        last: [B, K − 1, …] The last inputs of the convolution.
        memory: [B, G, R, Dk, Dv] The memory, in fp32.
    """

    last: Tensor
    memory: Tensor


def apply_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    memory: Tensor | None = None,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, L, G, R, Dv] of every token, and the memory [B, G, R, Dk, Dv] after the last one, in fp32.

    R value heads share the queries and keys of a group.

    Args:
        query: [B, L, G, Dk]. It is scaled to length 1/√Dk.
        key: [B, L, G, Dk]. It is scaled to length 1.
        value: [B, L, G, R, Dv].
        log_decay: [B, L, G, R], log α, at most 0.
        strength: [B, L, G, R], β.
        memory: [B, G, R, Dk, Dv] The memory before the first token, or None for zeros.
        lengths: [B] The length of each sequence, or None for L. Later tokens do not change the memory.
    """
    length, size = query.size(1), query.size(-1)
    if lengths is not None:
        within = (torch.arange(length, device=lengths.device) < lengths[:, None])[..., None, None]
        log_decay, strength = log_decay * within, strength * within
    block = min(BLOCK, length)
    query, key = (  # [B, G, 1, n, C, Dk]
        _split_into_blocks(_normalise(x.float()), block)[:, :, None] for x in (query, key)
    )
    query = query * size**-0.5
    value, log_decay, strength = (
        _split_into_blocks(x.float().flatten(2, 3), block).unflatten(1, value.shape[2:4])
        for x in (value, log_decay[..., None], strength[..., None])
    )  # [B, G, R, n, C, Dv or 1]
    since_begin = log_decay.cumsum(-2)
    to_end = (since_begin[..., -1:, :] - since_begin).exp()
    later = torch.ones(block, block, dtype=torch.bool, device=query.device).triu(1)
    decay = (since_begin - since_begin.mT).masked_fill(later, -torch.inf).exp()  # γ_i/γ_j if i ≥ j, else 0
    lower = strength * decay * (key @ key.mT)
    right = torch.cat([strength * value, strength * since_begin.exp() * key], dim=-1)
    # The solver reads only entries below the diagonal.
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    from_values, from_memory = solved.split([value.size(-1), size], dim=-1)
    state = value.new_zeros(*value.shape[:3], size, value.size(-1)) if memory is None else memory
    kept, end = (to_end * key).mT, since_begin[..., -1:, :].exp()
    memories, corrections = [], []
    for number in range(value.size(3)):
        memories.append(state)
        corrections.append(from_values[:, :, :, number] - from_memory[:, :, :, number] @ state)
        state = end[:, :, :, number] * state + kept[:, :, :, number] @ corrections[-1]
    read = (since_begin.exp() * query) @ torch.stack(memories, dim=3)
    output = read + (decay * (query @ key.mT)) @ torch.stack(corrections, dim=3)
    return output.flatten(3, 4)[:, :, :, :length].permute(0, 3, 1, 2, 4), state


def compute_log_decays(steps: Tensor, log_rate: Tensor, bias: Tensor) -> Tensor:
    """Return log α = −exp(log_rate)·softplus(steps + bias) in fp32; the last axis has one number for each head."""
    return -log_rate.float().exp() * softplus(steps.float() + bias.float())


def convolve(
    x: Tensor, weight: Tensor, earlier: Tensor | None = None, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the causal convolution [B, L, …] of each channel over time, and the last inputs [B, K − 1, …].

    Args:
        x: [B, L, …] The inputs.
        weight: […, K] The weights of the K − 1 inputs before an input, and of the input itself, in this order.
        earlier: [B, K − 1, …] The inputs before the first one, or None for zeros.
        lengths: [B] The length of each sequence, or None for L.
    """
    length, kernel = x.size(1), weight.size(-1)
    if earlier is None:
        earlier = x.new_zeros(x.size(0), kernel - 1, *x.shape[2:])
    both = torch.cat([earlier, x], dim=1)
    output = sum(both[:, first : first + length] * weight[..., first] for first in range(kernel))
    assert isinstance(output, Tensor)  # a kernel has at least one factor
    if lengths is None:
        return output, both[:, length:]
    last = lengths[:, None] + torch.arange(kernel - 1, device=x.device)
    return output, both[torch.arange(len(x), device=x.device)[:, None], last]


def _normalise(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def _split_into_blocks(x: Tensor, block: int) -> Tensor:
    """Return x [B, L, N, D] as [B, N, n, C, D], with zeros at the end, which do not change the memory."""
    x = x.transpose(1, 2)
    return pad(x, (0, 0, 0, -x.size(2) % block)).unflatten(2, (-1, block))

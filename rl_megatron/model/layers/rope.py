"""The frequencies of RoPE, plain or scaled for contexts longer than those of the model's first training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_megatron.config.model import Llama3Rope, RopeScaling, YarnRope


def frequencies(dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """Return RoPE's frequencies [dim/2] in fp32, in radians per position: base^(−2i/dim), scaled by `scaling`."""
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if scaling is None:
        return plain
    slow = plain / scaling.factor
    if isinstance(scaling, Llama3Rope):
        turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    elif isinstance(scaling, YarnRope):
        kept = 1.0 - _ramp(dim, base, scaling)
    else:
        return slow
    return slow * (1.0 - kept) + plain * kept


def _ramp(dim: int, base: float, scaling: YarnRope) -> Tensor:
    """Return YaRN's ramp [dim/2] from 0 to 1, linear in the index of the frequency.

    It is 0 for frequencies with beta_fast or more turns in the original context, and 1 for beta_slow or fewer.
    """

    def index(turns: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001  # avoids a division by 0; the ramp is then a step
    return ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)


def rotary_scale(scaling: RopeScaling | None) -> float:
    """Return the factor by which YaRN multiplies rotated queries and keys. It is 1 for other scalings."""
    if not isinstance(scaling, YarnRope):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return yarn_mscale(scaling.factor, 1.0)
    return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's 0.1·mscale·ln(factor) + 1, or 1 if `factor` is at most 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

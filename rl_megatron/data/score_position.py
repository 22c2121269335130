"""Where a reward model's score is read, in training, evaluation and as a reward: at the last token of a sequence.

A sequence ends as a rollout does: with the token that ends the turn of the assistant, and without what a chat template
writes behind it (`Renderer.pair`), or where it was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


def score_positions(data: Mapping[str, Any]) -> Int[Tensor, " batch"]:
    """Return the index of each sequence's last token.

    It follows from `input_lengths`. A batch without them has it at the last token with token_mask ≠ 0. It is 0 if there
    is none, or if the length is 0.

    Raises:
        KeyError: The batch has neither key.
        ValueError: The batch has no token.
    """
    if "input_lengths" in data:
        return (data["input_lengths"].long() - 1).clamp(min=0)
    if "token_mask" not in data:
        raise KeyError(f"a score is read where 'input_lengths' or 'token_mask' says; the batch has {sorted(data)}")
    mask = data["token_mask"]
    if mask.dim() != 2 or not mask.size(1):
        raise ValueError(f"token_mask {tuple(mask.shape)} must be [B, S] with at least one token")
    return torch.where(mask != 0, torch.arange(mask.size(1), device=mask.device), 0).amax(dim=1)

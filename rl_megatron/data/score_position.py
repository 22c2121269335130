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

    It follows from `input_lengths`. A batch without them has it at the last token with token_mask ≠ 0, or at 0 if there
    is none.
    """
    if "input_lengths" in data:
        return data["input_lengths"].long() - 1
    mask = data["token_mask"]
    return torch.where(mask != 0, torch.arange(mask.size(1), device=mask.device), 0).amax(dim=1)

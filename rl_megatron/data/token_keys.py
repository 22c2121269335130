"""The keys of a batch whose tensors have a value for each token: the usual ones, and those that a user declares."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # plugins declare keys before torch is imported

_token_keys = {
    "input_ids", "token_mask", "advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs",
    "logprobs", "reference_logprobs", "values", "returns", "temperature", "covariance_mask", "turn", "turn_rewards",
    "token_weight_versions", "routed_experts", "topk_logits", "topk_indices", "teacher_logprobs", "teacher_logits",
    "teacher_topk_logits", "teacher_topk_indices", "student_logits",
}  # fmt: skip


def declare_token_keys(*keys: str) -> None:
    """Let tensors under these keys of a batch have a value for each token, [B, S, …].

    Tensors under other keys that the package does not know have a value for each sequence, and are not split by tokens.
    Every rank must declare the same keys before it uses a batch, for example when a plugin is imported.
    """
    _token_keys.update(keys)


def is_token_key(key: str) -> bool:
    """Return whether tensors under this key may have a value for each token: it is a usual or a declared key."""
    return key in _token_keys


def is_per_token(key: str, value: Tensor, width: int) -> bool:
    """Return whether a tensor of a batch has a value for each token.

    A tensor [B] has a value for each sequence, whatever its key is.

    Args:
        key: Its key.
        value: [B, …] The tensor.
        width: S, the width of the token ids.

    Raises:
        ValueError: The tensor has a value for each token, but its dimension 1 is not S.
    """
    if not is_token_key(key) or value.dim() < 2:
        return False
    if value.size(1) != width:
        raise ValueError(
            f"the batch's {key!r} has a value for each token, but its shape {tuple(value.shape)} does not fit the "
            f"{width} tokens of 'input_ids'; make it [B, {width}, …], or [B] for one value per sequence"
        )
    return True

"""The batch of the clipped policy gradient loss."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from torch import Tensor


class ClippedPGLossDataDict(TypedDict):
    """The batch of `ClippedPGLossFn`. Streams are [B, S] and aligned with input_ids. Their first column is not used.

    Attributes:
        input_ids: Token ids.
        advantages: Advantages, [B, S] or [B].
        prev_logprobs: log π_prev. Without it, π_prev is the policy of this forward pass, which is right for the first
            update after the completions were sampled.
        generation_logprobs: log π_generation. It is needed only for the importance sampling correction, the on-policy
            KL approximation and the generation metrics.
        reference_policy_logprobs: log π_ref. It is needed only with a KL penalty in the loss.
        token_mask: Which tokens count.
        sample_mask: Which samples count, [B].
        rewards: Rewards [B]. They are needed only with positive_example_nll_weight.
        global_positive_toks: The number of tokens in samples with a positive reward, over the global batch. Training
            sets it.
        curr_logprobs_unfiltered: log π [B, S-1] before top-k and top-p. The KL reads it instead of the logprobs.
        covariance_mask: 1 at tokens that Clip-Cov or KL-Cov has selected, otherwise 0. Only they need it.
        temperature: A number, [B] or [B, S]. If the call gives logits, they are divided by it.
    """

    input_ids: Tensor
    advantages: Tensor
    prev_logprobs: NotRequired[Tensor]
    generation_logprobs: NotRequired[Tensor]
    reference_policy_logprobs: NotRequired[Tensor]
    token_mask: Tensor
    sample_mask: Tensor
    rewards: NotRequired[Tensor]
    global_positive_toks: NotRequired[Tensor]
    curr_logprobs_unfiltered: NotRequired[Tensor]
    covariance_mask: NotRequired[Tensor]
    temperature: NotRequired[Tensor]

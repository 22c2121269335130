"""Check prompts, and make a training batch of prompts and completions, for every engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution import NonFiniteLoss
from rl_megatron.generation.interfaces import Sampling


def check_prompts(prompts: list[list[int]], sampling: Sampling, max_sequence_length: int) -> None:
    """Check that the prompts and their completions fit the model.

    Args:
        prompts: Token ids.
        sampling: How completions are sampled.
        max_sequence_length: Tokens of the longest sequence that the model takes.

    Raises:
        ConfigError: A prompt is empty, or prompt and `max_new_tokens` together exceed `max_sequence_length`.
    """
    if not all(prompts):
        raise ConfigError("a prompt is empty; every prompt needs at least one token")
    longest = max(len(prompt) for prompt in prompts)
    if longest + sampling.max_new_tokens > max_sequence_length:
        raise ConfigError(
            f"a prompt of {longest} tokens and generation.max_new_tokens={sampling.max_new_tokens} exceed "
            f"model.max_sequence_length={max_sequence_length}; lower max_new_tokens or raise the limit"
        )


def rollouts(
    prompts: list[list[int]], parts: Sequence[Tensor], sampling: Sampling, weight_version: int
) -> BatchedDataDict:
    """Return the batch that `RolloutEngine.generate` promises, on the CPU.

    Args:
        prompts: Token ids.
        parts: What `Completions.parts` returns, for all prompts.
        sampling: How the completions were sampled.
        weight_version: The version of the policy's weights.

    Raises:
        NonFiniteLoss: The logits of a sequence were NaN.
    """
    completions, logprobs, lengths, nan_at = (part.cpu() for part in parts)
    if nan_at.any():
        first = nan_at[nan_at > 0].min().item()
        raise NonFiniteLoss(f"the model's logits are NaN or infinite at token {first} of a completion")
    num_sequences = len(prompts)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int((prompt_lengths + lengths).max())
    input_ids = torch.zeros(num_sequences, width, dtype=torch.long)
    token_mask = torch.zeros(num_sequences, width)
    generation_logprobs = torch.zeros(num_sequences, width)
    for index, (prompt, length) in enumerate(zip(prompts, lengths.tolist(), strict=True)):
        end = len(prompt) + length
        input_ids[index, : len(prompt)] = torch.tensor(prompt)
        input_ids[index, len(prompt) : end] = completions[index, :length]
        token_mask[index, len(prompt) : end] = 1.0
        generation_logprobs[index, len(prompt) : end] = logprobs[index, :length]
    last = completions.gather(1, (lengths - 1)[:, None])[:, 0]
    stopped = torch.isin(last, torch.tensor(sampling.stop_ids, dtype=torch.long))
    if sampling.stop_strings is not None:
        texts = zip(completions.tolist(), lengths.tolist(), strict=True)
        stopped |= torch.tensor([sampling.stop_strings.found_in(ids[:length]) for ids, length in texts])
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": prompt_lengths + lengths,
            "prompt_lengths": prompt_lengths,
            "token_mask": token_mask,
            "sample_mask": torch.ones(num_sequences),
            "generation_logprobs": generation_logprobs,
            "temperature": torch.full((num_sequences,), sampling.temperature or 1.0),
            "top_k": torch.full((num_sequences,), sampling.top_k),
            "top_p": torch.full((num_sequences,), float(sampling.top_p)),
            "weight_version": torch.full((num_sequences,), weight_version),
            "stopped": stopped,
        }
    )

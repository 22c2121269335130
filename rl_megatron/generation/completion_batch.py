"""Check prompts, and make a training batch of prompts and completions, for every engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rl_megatron.batching.routing import ROUTED_EXPERTS, UNKNOWN_EXPERT
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.execution import NonFiniteLoss
from rl_megatron.generation.interfaces import Completion, EngineFailed, Sampling


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


def rollouts(prompts: list[list[int]], completions: Sequence[Completion], sampling: Sampling) -> BatchedDataDict:
    """Return the batch that `RolloutEngine.generate` promises, on the CPU.

    Args:
        prompts: Token ids.
        completions: The completion of each prompt.
        sampling: How the completions were sampled.

    Raises:
        NonFiniteLoss: The logits of a sequence were NaN.
        EngineFailed: The routed experts of a completion are not those of its tokens.
    """
    num_sequences = len(prompts)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    lengths = torch.tensor([len(completion.ids) for completion in completions])
    ids = _flat((completion.ids for completion in completions), torch.long)
    logprobs = _flat((completion.logprobs for completion in completions), torch.float32)
    columns = torch.arange(int((prompt_lengths + lengths).max()))
    in_prompt = columns < prompt_lengths[:, None]
    sampled = (columns < (prompt_lengths + lengths)[:, None]) & ~in_prompt
    if logprobs.isnan().any():
        numbers = (columns - prompt_lengths[:, None] + 1)[sampled]
        first = int(numbers[logprobs.isnan()].min())
        raise NonFiniteLoss(f"the model's logits are NaN or infinite at token {first} of a completion")

    input_ids = torch.zeros(sampled.shape, dtype=torch.long)
    input_ids[in_prompt] = _flat(prompts, torch.long)
    input_ids[sampled] = ids
    token_weight_versions = torch.full(sampled.shape, -1)
    token_weight_versions[sampled] = _versions(completions)
    oldest = token_weight_versions.masked_fill(~sampled, torch.iinfo(torch.long).max).amin(1)
    experts = _routed_experts(prompts, completions, len(columns))
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": prompt_lengths + lengths,
            "prompt_lengths": prompt_lengths,
            "token_mask": sampled.float(),
            "sample_mask": torch.ones(num_sequences),
            "generation_logprobs": torch.zeros(sampled.shape).masked_scatter_(sampled, logprobs),
            "temperature": torch.full((num_sequences,), sampling.temperature or 1.0),
            "top_k": torch.full((num_sequences,), sampling.top_k),
            "top_p": torch.full((num_sequences,), float(sampling.top_p)),
            "token_weight_versions": token_weight_versions,
            "weight_version": torch.where(lengths > 0, oldest, -1),
            "stopped": torch.tensor([completion.reason == "stop" for completion in completions]),
            **({} if experts is None else {ROUTED_EXPERTS: experts}),
        }
    )


def _routed_experts(prompts: list[list[int]], completions: Sequence[Completion], width: int) -> Tensor | None:
    """Return the experts of every token, [B, width, layers, k] int16, or None if no completion has any."""
    recorded = [completion.routed_experts for completion in completions]
    first = next((each for each in recorded if each is not None), None)
    if first is None:
        return None
    experts = torch.full((len(prompts), width, *first.shape[1:]), UNKNOWN_EXPERT, dtype=torch.int16)
    for index, (prompt, completion, each) in enumerate(zip(prompts, completions, recorded, strict=True)):
        wanted = (len(prompt) + len(completion.ids) - 1, *first.shape[1:])
        if each is None and completion.reason == "abort":
            continue  # it was aborted before the model had read it
        if each is None or tuple(each.shape) != wanted:
            raise EngineFailed(
                f"request {completion.request_id}: routed experts have shape "
                f"{None if each is None else tuple(each.shape)}, but its tokens ask for {wanted}"
            )
        experts[index, : wanted[0]] = each.to(torch.int16)
    return experts


def _flat(sequences: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return the numbers of all sequences, one sequence after the other."""
    kind = np.float64 if dtype.is_floating_point else np.int64
    return torch.from_numpy(np.fromiter(chain.from_iterable(sequences), kind)).to(dtype)


def _versions(completions: Sequence[Completion]) -> Tensor:
    """Return the version of the weights of every token, one completion after the other."""
    spans = [(span.version, span.end - span.start) for completion in completions for span in completion.versions]
    versions, lengths = torch.tensor(spans, dtype=torch.long).view(-1, 2).unbind(1)
    return versions.repeat_interleave(lengths)

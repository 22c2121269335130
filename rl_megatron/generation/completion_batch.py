"""Generate with any engine: check prompts, and make a training batch of prompts and completions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rl_megatron.batching.routing import ROUTED_EXPERTS, UNKNOWN_EXPERT
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.generation.interfaces import (
    Completion,
    EngineFailed,
    Request,
    RolloutEngine,
    Sampling,
)
from rl_megatron.generation.requests import make_requests
from rl_megatron.topology.ranks import Ranks
from rl_megatron.training.metrics import NonFiniteLoss


def check_requests(requests: Iterable[Request], max_sequence_length: int, vocab_size: int) -> None:
    """Check that the prompts and their completions fit the model.

    Raises:
        ConfigError: A prompt is empty or has a token outside the vocabulary, or prompt and `max_new_tokens` together
            exceed `max_sequence_length`.
    """
    longest, new = 0, 0
    for request in requests:
        if not request.prompt:
            raise ConfigError("a prompt is empty; every prompt needs at least one token")
        lowest, highest = min(request.prompt), max(request.prompt)
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise ConfigError(
                f"a prompt has the token id {wrong}, but the vocabulary is 0 … {vocab_size - 1}; encode prompts with "
                "the model's tokenizer"
            )
        if len(request.prompt) + request.sampling.max_new_tokens > longest + new:
            longest, new = len(request.prompt), request.sampling.max_new_tokens
    if longest + new > max_sequence_length:
        raise ConfigError(
            f"a prompt of {longest} tokens and generation.max_new_tokens={new} exceed "
            f"model.max_sequence_length={max_sequence_length}; lower max_new_tokens or raise the limit"
        )


def generate(engine: RolloutEngine, prompts: list[list[int]], sampling: Sampling, seed: int) -> BatchedDataDict:
    """Generate one completion for each prompt, and return them as a batch, the same on every rank. Collective.

    Args:
        engine: The engine.
        prompts: Token ids of each prompt, at least one.
        sampling: How the completions are sampled.
        seed: The only source of random numbers.

    Returns:
        A batch, right-padded to the longest sequence of S tokens, with

        - `input_ids` [B, S]: prompt and completion;
        - `prompt_lengths` [B]; `input_lengths` [B]: the tokens of prompt and completion, including a stop token;
        - `token_mask` [B, S] fp32: 1 on sampled tokens; `sample_mask` [B] fp32: ones;
        - `generation_logprobs` [B, S] fp32: log softmax(logits/temperature) of token t at entry t, *before* top-k and
          top-p, at temperature 1 if sampling is greedy; 0 outside the completion;
        - `temperature` [B]: the temperature of these logprobs; `top_k` [B] int64 and `top_p` [B] fp32, as in
          `sampling`;
        - `token_weight_versions` [B, S] int64: the version of the policy's weights that generated token t at entry t;
          -1 outside the completion;
        - `weight_version` [B] int64: the oldest of these versions;
        - `stopped` [B] bool: whether a stop token or stop string ended the sequence;
        - `routed_experts` [B, S, L, k] int16, if `generation.router_replay` is on: the experts of token t in each of L
          layers at entry t; -1 for tokens that the model did not read. Layers without experts hold arbitrary values.

    Raises:
        ConfigError: A prompt is empty, or too long for `max_new_tokens`.
        EngineFailed: The engine does not serve the policy's current weights, or cannot continue.
        NonFiniteLoss: Logits are NaN or infinite.
    """
    ranks = Ranks.detect()
    on_rank0 = engine.complete(make_requests(prompts, sampling, seed) if ranks.leads else ())
    completions = ranks.share(lambda: on_rank0)
    return make_completion_batch(
        [
            SampledSequence([*prompt, *completion.ids], ((len(prompt), completion),), sampling)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    )


@dataclass(frozen=True)
class SampledSequence:
    """A sequence and the completions in it.

    Attributes:
        ids: All token ids.
        completions: (index of the first token, completion) of each completion, in order. Tokens between completions are
            not sampled.
        sampling: How the completions were sampled.
    """

    ids: Sequence[int]
    completions: Sequence[tuple[int, Completion]]
    sampling: Sampling

    @property
    def prompt_length(self) -> int:
        """Return the number of tokens before the first completion."""
        return self.completions[0][0] if self.completions else len(self.ids)


def make_completion_batch(sequences: Sequence[SampledSequence]) -> BatchedDataDict:
    """Return sequences with their completions as a batch with the keys of `generate`, on the CPU.

    `stopped` describes the last completion of each sequence.

    Raises:
        ValueError: There is no sequence.
        NonFiniteLoss: The logits of a sequence were NaN.
        EngineFailed: The routed experts of a completion do not fit its tokens.
    """
    if not sequences:
        raise ValueError("a batch of completions needs at least one prompt, got none")
    lengths = torch.tensor([len(sequence.ids) for sequence in sequences])
    columns = torch.arange(int(lengths.max()))
    mask = np.zeros((len(sequences), len(columns)), dtype=bool)
    for index, sequence in enumerate(sequences):
        for start, completion in sequence.completions:
            mask[index, start : start + len(completion.ids)] = True
    sampled = torch.from_numpy(mask)
    completions = [completion for sequence in sequences for _, completion in sequence.completions]
    logprobs = _concatenate((completion.logprobs for completion in completions), torch.float32)
    if logprobs.isnan().any():
        numbers = [number for one in completions for number, value in enumerate(one.logprobs, 1) if math.isnan(value)]
        raise NonFiniteLoss(f"the model's logits are NaN or infinite at token {min(numbers)} of a completion")

    input_ids = torch.zeros(sampled.shape, dtype=torch.long)
    input_ids[columns < lengths[:, None]] = _concatenate((sequence.ids for sequence in sequences), torch.long)
    token_weight_versions = torch.full(sampled.shape, -1)
    token_weight_versions[sampled] = _expand_versions(completions)
    oldest = token_weight_versions.masked_fill(~sampled, torch.iinfo(torch.long).max).amin(1)
    experts = _gather_experts(sequences, len(columns))
    samplings = [sequence.sampling for sequence in sequences]
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": lengths,
            "prompt_lengths": torch.tensor([sequence.prompt_length for sequence in sequences]),
            "token_mask": sampled.float(),
            "sample_mask": torch.ones(len(sequences)),
            "generation_logprobs": torch.zeros(sampled.shape).masked_scatter_(sampled, logprobs),
            "temperature": torch.tensor([float(sampling.temperature or 1.0) for sampling in samplings]),
            "top_k": torch.tensor([sampling.top_k for sampling in samplings]),
            "top_p": torch.tensor([float(sampling.top_p) for sampling in samplings]),
            "token_weight_versions": token_weight_versions,
            "weight_version": torch.where(sampled.any(1), oldest, -1),
            "stopped": torch.tensor(
                [bool(one.completions) and one.completions[-1][1].reason == "stop" for one in sequences]
            ),
            **({} if experts is None else {ROUTED_EXPERTS: experts}),
        }
    )


def _gather_experts(sequences: Sequence[SampledSequence], width: int) -> Tensor | None:
    """Return the experts of every token, [B, width, layers, k] int16, or None if no completion has any.

    The tokens between two completions have the experts that were recorded with the second completion.
    """
    recorded = (completion.routed_experts for one in sequences for _, completion in one.completions)
    first = next((experts for experts in recorded if experts is not None), None)
    if first is None:
        return None
    experts = torch.full((len(sequences), width, *first.shape[1:]), UNKNOWN_EXPERT, dtype=torch.int16)
    for index, sequence in enumerate(sequences):
        begin = 0
        for start, completion in sequence.completions:
            chosen, end = completion.routed_experts, start + len(completion.ids) - 1
            if chosen is None and completion.reason == "abort":
                continue  # it was aborted before the model read its prompt
            if chosen is None or tuple(chosen.shape) != (end, *first.shape[1:]):
                shape = None if chosen is None else tuple(chosen.shape)
                raise EngineFailed(
                    f"request {completion.request_id}: routed experts have shape {shape}, but its tokens need "
                    f"{(end, *first.shape[1:])}"
                )
            experts[index, begin:end] = chosen[begin:].to(torch.int16)
            begin = end
    return experts


def _concatenate(sequences: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return the values of all sequences, one sequence after the other."""
    kind = np.float64 if dtype.is_floating_point else np.int64
    return torch.from_numpy(np.fromiter(chain.from_iterable(sequences), kind)).to(dtype)


def _expand_versions(completions: Sequence[Completion]) -> Tensor:
    """Return the version of the weights that generated each token, one completion after the other."""
    spans = [(span.version, span.end - span.start) for completion in completions for span in completion.versions]
    versions, lengths = torch.tensor(spans, dtype=torch.long).view(-1, 2).unbind(1)
    return versions.repeat_interleave(lengths)

"""Requests: their seeds, their random numbers, and the partial completion of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rl_megatron.generation.interfaces import Completion, Request, Sampling, WeightSpan

_GOLDEN = 0x9E3779B97F4A7C15
_BITS = (1 << 64) - 1


def _mix(state: int) -> int:
    return int(_mix_all(np.array([state & _BITS], dtype=np.uint64))[0])


def _mix_all(states: np.ndarray) -> np.ndarray:
    """Return the output of SplitMix64 for each state, uint64.

    Source: Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators".
    """
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))


def derive_seed(seed: int, index: int) -> int:
    """Return the seed of request `index` of a batch with seed `seed`; it fits a non-negative int64."""
    return _mix(_mix(seed) + index * _GOLDEN) >> 1


def make_requests(prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int) -> list[Request]:
    """Make the requests of a batch: request i has the id `{seed}-{i}` and the seed `derive_seed(seed, i)`."""
    return [
        Request(f"{seed}-{index}", tuple(prompt), sampling, derive_seed(seed, index))
        for index, prompt in enumerate(prompts)
    ]


def draw_uniforms(requests: Sequence[Request], num_tokens: int) -> Tensor:
    """Draw the random numbers that decide the first tokens of each request, [requests, num_tokens] fp64 in [0, 1).

    Each number depends only on the request's seed and the token's index: not on the engine, the batch, the order of
    requests, or `num_tokens`.
    """
    seeds = np.array([request.seed & _BITS for request in requests], dtype=np.uint64)
    steps = np.arange(1, num_tokens + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return torch.from_numpy((_mix_all(seeds[:, None] + steps) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@dataclass
class PartialCompletion:
    """A request and the part of its completion generated so far. Another rank can continue it, with other weights."""

    request: Request
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[WeightSpan] = field(default_factory=list)
    routed_experts: Tensor | None = None  # those of the tokens that the model has read; None if not recorded

    @property
    def all_ids(self) -> list[int]:
        """Return all token ids, those of the prompt first."""
        return [*self.request.prompt, *self.ids]

    @property
    def tokens_left(self) -> int:
        return self.request.sampling.max_new_tokens - len(self.ids)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens that weights of this version generated."""
        if not ids:
            return
        start = len(self.ids)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.ids += ids
        self.logprobs += logprobs
        self.spans.append(WeightSpan(version, start, len(self.ids)))

    def complete(self, reason: Literal["stop", "length", "abort"]) -> Completion:
        """Return the completion, which ended for this reason."""
        parts = tuple(self.ids), tuple(self.logprobs), tuple(self.spans)
        return Completion(self.request.request_id, *parts, reason, self.routed_experts)

"""Samples and prompt logprobs of an adapter, or of the base model. Every rank calls it with the same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rl_megatron.generation.embedded import EmbeddedEngine
from rl_megatron.generation.interfaces import Completion, Request, Sampling
from rl_megatron.generation.requests import derive_seed
from rl_megatron.service.datums import Datum
from rl_megatron.service.losses import TARGETS, choose_loss
from rl_megatron.service.trainer import ServiceTrainer
from rl_megatron.training.adapter_runs import AdapterRun, SavedAdapter

EMPTY_CELL = -99999.0
"""The logprob of an entry of a top-k table that has no token."""


@dataclass(frozen=True)
class SamplePrompt:
    """A request for samples of one prompt.

    Attributes:
        name: A name of the request that no other request of the same call has.
        prompt: Token ids, at least one.
        num_samples: How many completions; 0: only logprobs of the prompt.
        sampling: How they are sampled.
        seed: The seed of the completions.
        prompt_logprobs: Whether the logprobs of the prompt's tokens are wanted.
        top_k: How many of the most likely tokens are wanted at each position of the prompt; 0: none.
        targets: [N-1, K] The tokens whose logprobs are wanted at each position of the prompt but the first; a negative
            number is no token. None: no further logprobs.
        sample_top_k: How many of the most likely tokens are wanted at each sampled token; 0: none.
        last_n: The number of the prompt's last tokens that have logprobs; None: all but the first.
    """

    name: str
    prompt: tuple[int, ...]
    num_samples: int
    sampling: Sampling
    seed: int
    prompt_logprobs: bool = False
    top_k: int = 0
    targets: np.ndarray | None = None
    sample_top_k: int = 0
    last_n: int | None = None

    def requests(self) -> list[Request]:
        """Return the request of each completion."""
        return [
            Request(f"{self.name}-{index}", self.prompt, self.sampling, derive_seed(self.seed, index))
            for index in range(self.num_samples)
        ]


@dataclass(frozen=True)
class Top:
    """The most likely tokens at N positions.

    Attributes:
        ids: [N, k] int64, the most likely first; 0 at positions without any.
        logprobs: [N, k] Their logprobs; `EMPTY_CELL` at positions without any.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class SampledPrompt:
    """The samples of a prompt; what was not asked for is None.

    Attributes:
        completions: The completions.
        prompt_logprobs: [N] The logprobs of the prompt's tokens; NaN for the first one.
        top: The most likely tokens at each of the N positions; those without a logprob have `EMPTY_CELL`.
        target_logprobs: [N-1, K] The logprobs of the targets, and 0 where there is no token.
        sample_tops: The most likely tokens at each token of every completion.
    """

    completions: Sequence[Completion]
    prompt_logprobs: np.ndarray | None = None
    top: Top | None = None
    target_logprobs: np.ndarray | None = None
    sample_tops: Sequence[Top] | None = None


class Sampler:
    """Samples completions with the model of a `ServiceTrainer`. All methods are collective."""

    def __init__(self, trainer: ServiceTrainer):
        self._trainer = trainer
        self._engine = EmbeddedEngine(trainer.policy, cuda_graphs="off")

    def sample(self, run: AdapterRun | SavedAdapter | None, prompts: Sequence[SamplePrompt]) -> list[SampledPrompt]:
        """Return the samples of prompts with a run's adapter, or with the base model if `run` is None.

        Raises:
            ConfigError: A prompt is too long for its `max_new_tokens`.
        """
        policy = self._trainer.policy
        requests = [request for prompt in prompts for request in prompt.requests()]
        if not requests:
            completions = []
        else:
            with self._trainer.using(run):
                completions = self._engine.complete(requests if policy.topology.ranks.leads else [])
        by_name = {completion.request_id: completion for completion in completions}
        results = []
        for prompt in prompts:
            chosen = [by_name[request.request_id] for request in prompt.requests()] if by_name else []
            tops = None
            if prompt.sample_top_k:
                start = len(prompt.prompt) - 1
                sampled = policy.topology.ranks.share(lambda c=chosen: [one.ids for one in c])
                tops = [
                    self._find_top(run, np.array((*prompt.prompt, *ids)), prompt.sample_top_k, start) for ids in sampled
                ]
            results.append(SampledPrompt(chosen, *self._read_prompt(run, prompt), tops))
        return results

    def _read_prompt(
        self, run: AdapterRun | SavedAdapter | None, prompt: SamplePrompt
    ) -> tuple[np.ndarray | None, Top | None, np.ndarray | None]:
        """Return (logprobs, top, target logprobs) of a prompt's tokens."""
        tokens = np.array(prompt.prompt, dtype=np.int64)
        first = 1 if prompt.last_n is None else max(len(tokens) - prompt.last_n, 1)
        logprobs = top = targets = None
        if prompt.prompt_logprobs:
            logprobs = np.concatenate([[np.nan], self._read(run, tokens, tokens[1:, None])[:, 0]])
            logprobs[:first] = np.nan
        if prompt.top_k:
            likely, shape = self._find_top(run, tokens, prompt.top_k, first - 1), (first, prompt.top_k)
            top = Top(
                np.concatenate([np.zeros(shape, dtype=np.int64), likely.ids]),
                np.concatenate([np.full(shape, EMPTY_CELL), likely.logprobs]),
            )
        if prompt.targets is not None:
            targets = np.where(prompt.targets < 0, 0.0, self._read(run, tokens, np.maximum(prompt.targets, 0)))
        return logprobs, top, targets

    def _read(self, run: AdapterRun | SavedAdapter | None, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the logprobs [N-1, K] of targets after each of the first N-1 tokens."""
        if not len(targets):
            return np.zeros(targets.shape)
        datum = Datum(tokens[:-1], {TARGETS: targets})
        return self._trainer.compute(run, [datum], choose_loss("cross_entropy"), backward=False).logprobs[0]

    def _find_top(self, run: AdapterRun | SavedAdapter | None, tokens: np.ndarray, k: int, start: int) -> Top:
        """Return the k most likely tokens after token `start` and each later one of the first N-1 tokens."""
        if len(tokens) == 1:
            return Top(np.zeros((0, k), dtype=np.int64), np.zeros((0, k)))
        with self._trainer.using(run):
            likely = self._trainer.policy.get_topk_logits({"input_ids": torch.from_numpy(tokens[None, :-1])}, k)
        ids = likely["topk_indices"][0].numpy()
        return Top(ids[start:], self._read(run, tokens, ids)[start:])

"""Engines that sample without a model, and what runs rollout workers on them in one process."""

import random
from types import SimpleNamespace
from typing import Any

import torch

from rl_megatron.generation.interfaces import Completion, Sampling, WeightSpan
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rollouts.runner import RolloutRules, RolloutRunner, RolloutTask
from rl_megatron.rollouts.scored import ScoredRollouts
from rl_megatron.rollouts.trajectory import TokenLimits
from rl_megatron.rollouts.worker import completion
from rl_megatron.topology.ranks import Ranks

SAMPLING = Sampling(8, stop_ids=(0,))
NO_LIMITS = TokenLimits(10**6, 10**6)
NO_LIMITS = TokenLimits(10**6, 10**6)


class RandomTokens:
    """An engine that draws tokens from some ids. Each request has the random numbers of its seed."""

    def __init__(self, ids, stop_id=0, stops=0.2):
        self.ids, self.stop_id, self.stops, self.rounds = list(ids), stop_id, stops, []

    def complete(self, requests):
        self.rounds.append(list(requests))
        return [self.completion(request) for request in requests]

    def completion(self, request):
        chance, ids, reason = random.Random(request.seed), [], "length"
        while len(ids) < request.sampling.max_new_tokens and reason == "length":
            ids.append(chance.choice(self.ids))
            if chance.random() < self.stops:
                ids[-1], reason = self.stop_id, "stop"
        logprobs = tuple(-chance.random() for _ in ids)
        return Completion(request.request_id, tuple(ids), logprobs, (WeightSpan(1, 0, len(ids)),), reason)


def run(worker, prompts, engine, tokenizer, limits=NO_LIMITS, sampling=SAMPLING, owned=(), **rules):
    """Return the result of a worker for each prompt."""
    ranks = Ranks()
    runner = RolloutRunner(worker, RolloutRules(limits, **rules), tokenizer, ranks, 60.0, owned)
    tasks = [RolloutTask(f"7-{number}", prompt, 1000 + number) for number, prompt in enumerate(prompts)]
    try:
        return runner.run(tasks, engine, sampling)
    finally:
        runner.close()


class Scripted:
    """An engine that writes given tokens, prompt by prompt and in this order, until a token stops it or by length."""

    def __init__(self, written):
        self.written = iter(written)

    def complete(self, requests):
        return [self.completion(request, next(self.written)) for request in requests]

    def completion(self, request, written):
        ids = list(written[: request.sampling.max_new_tokens])
        stops = [number for number, id_ in enumerate(ids) if id_ in request.sampling.stop_ids]
        ids = ids[: stops[0] + 1] if stops else ids
        assert stops or len(ids) == request.sampling.max_new_tokens, "what is written ends before the completion"
        spans = (WeightSpan(1, 0, len(ids)),)
        return Completion(request.request_id, tuple(ids), (-1.0,) * len(ids), spans, "stop" if stops else "length")


def samples_of(written, prompts, tokenizer, sampling):
    """Return the samples that a reward model gets, one for each prompt, if the policy writes given tokens."""
    results = run(completion, prompts, Scripted(written), tokenizer, sampling=sampling)
    score = lambda samples: (torch.zeros(len(samples)), RewardMetrics())  # noqa: E731
    scorer: Any = SimpleNamespace(score_samples=score, reads_sequences=True)
    runner: Any = SimpleNamespace(makes_turns=False)
    made = ScoredRollouts(runner, scorer, tokenizer)
    return made.score(results, scorer).samples

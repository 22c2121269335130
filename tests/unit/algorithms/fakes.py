"""Fakes of the objects that an algorithm works with: a tokenizer of characters, a task, an engine, a policy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rl_megatron.batching.batch import Batch
from rl_megatron.config.loading.load import load_config
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tasks import Problem
from rl_megatron.generation.interfaces import Completion, Request, WeightSpan
from rl_megatron.rewards.metrics import RewardMetrics
from rl_megatron.rollouts.runner import RolloutRules, RolloutRunner
from rl_megatron.rollouts.sampler import Sampler
from rl_megatron.rollouts.scored import ScoredRollouts
from rl_megatron.rollouts.trajectory import TokenLimits
from rl_megatron.rollouts.worker import completion
from rl_megatron.timing import PhaseTimer
from rl_megatron.topology.ranks import Ranks

EOS = 0
_DATA = load_config([]).first.data


class Characters:
    """One token per character, its code point; 0 ends a sequence."""

    digest = "characters"

    eos_id = pad_id = EOS
    vocab_size = 128
    prefix_ids, chat_templates, named_tokens, special_tokens = [], {}, {}, ()

    def encode(self, text):
        return [ord(character) for character in text]

    def encode_template(self, template, values):
        return self.encode(template.format(**values))

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i) for i in ids if i != EOS)


@dataclass
class Echo:
    """A task whose reward for a completion is the number that it spells."""

    name = "echo"
    prompts: tuple[str, ...] = ("a", "b", "c", "d")

    def train_problems(self, count=None, seed=0):
        return [Problem(prompt, "1") for prompt in self.prompts]

    def reward(self, problem, completion):
        return float(completion)


# The topology of a process without others.
ONE_RANK = SimpleNamespace(rank=0, world_size=1, device=torch.device("cpu"), ranks=Ranks())


@dataclass
class Problems:
    """A data source of one task's problems."""

    of_task: Echo

    def task(self):
        return self.of_task

    def renderer(self, tokenizer):
        return SimpleNamespace(
            tokenizer=tokenizer, data=_DATA, end_of_turn_ids=(),
            encode_prompt=lambda record: tokenizer.encode(record.prompt),
            build_prompt=lambda problem, record, ids: EncodedPrompt(ids, problem, record),
        )  # fmt: skip

    def problems(self, wanted):
        return self.of_task.train_problems(wanted)


@dataclass
class ScoredHere:
    """A scorer that calls the task's reward in this process."""

    task: Echo

    def start(self):
        pass

    reads_sequences = False

    def score_samples(self, samples):
        return torch.tensor([self.task.reward(each.problem, each.completion) for each in samples]), RewardMetrics()


@dataclass
class Scripted:
    """An engine that answers a prompt with its next scripted text, and records the calls."""

    answers: dict[str, list[str]]
    calls: list[tuple[list[str], int]] = field(default_factory=list)

    def sleep(self): ...

    def complete(self, requests):
        words = ["".join(map(chr, request.prompt)) for request in requests]
        self.calls.append((words, requests[0].seed))
        answers = [[ord(c) for c in self.answers[word].pop(0)] + [EOS] for word in words]
        return [completed(request, ids) for request, ids in zip(requests, answers, strict=True)]


def completed(request: Request, ids: list[int], reason: str = "stop") -> Completion:
    """Return the completion of a request, of weights of version 1 that give every token e^-1."""
    spans = (WeightSpan(1, 0, len(ids)),)
    return Completion(request.request_id, tuple(ids), (-1.0,) * len(ids), spans, reason)


def runner_of_completions(ranks: Ranks = Ranks()) -> RolloutRunner:  # noqa: B008  # it is frozen
    """Return what makes one completion per prompt; by default in one process."""
    rules = RolloutRules(TokenLimits(10**6, 10**6))
    return RolloutRunner(completion, rules, Characters(), ranks, 60.0)


def rollouts_of(scorer, tokenizer=None) -> ScoredRollouts:
    """Return what makes one completion per prompt in this process, and scores it."""
    return ScoredRollouts(runner_of_completions(), scorer, tokenizer or Characters())


def sampling(config, engine, scorer, tokenizer=None, policy=None, **attributes: object):
    """Return (a stage with these attributes whose batches have the numbers of their steps, its policy, its sampler)."""
    ignored = lambda *_: None  # noqa: E731
    tokenizer, policy = tokenizer or Characters(), policy or SimpleNamespace(topology=ONE_RANK)
    empty = {"use_loader": ignored, "keep": ignored, "rollout_files": Path("unused"), "timer": PhaseTimer()}
    loop = SimpleNamespace(**empty | attributes, config=config, tokenizer=tokenizer, batch_number=int)
    return loop, policy, Sampler(loop, policy, engine, rollouts_of(scorer, tokenizer))


def decoded(rollouts, tokenizer):
    """Return the text of each sequence behind its prompt."""
    columns = (rollouts[key].tolist() for key in ("input_ids", "prompt_lengths", "input_lengths"))
    return [tokenizer.decode(ids[start:end]) for ids, start, end in zip(*columns, strict=True)]


def whole(values: Mapping[str, Any]) -> Batch:
    """Return sequences as a whole batch. Those without tokens get some, if it does not matter which."""
    tokens = {} if "input_ids" in values else {"input_ids": torch.zeros(values["token_mask"].shape, dtype=torch.long)}
    return Batch.from_whole({**tokens, **values})

"""Fakes of the objects that an algorithm works with: a tokenizer of characters, a task, an engine, a policy."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from rl_megatron.config.load import load_config
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.encoding import EncodedPrompt
from rl_megatron.data.tasks import Problem
from rl_megatron.rewards.scorer import RewardMetrics, decoded

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


@dataclass
class Problems:
    """A data source of one task's problems."""

    of_task: Echo

    def task(self):
        return self.of_task

    def renderer(self, tokenizer):
        return SimpleNamespace(
            tokenizer=tokenizer, data=_DATA, end_of_turn_ids=(),
            prompt_ids=lambda record: tokenizer.encode(record.prompt),
            with_prompt=lambda problem, record, ids: EncodedPrompt(ids, problem, record),
        )  # fmt: skip

    def problems(self, wanted):
        return self.of_task.train_problems(wanted)


@dataclass
class ScoredHere:
    """A scorer that calls the task's reward in this process."""

    task: Echo

    def start(self):
        pass

    def score_rollouts(self, problems, rollouts, tokenizer):
        texts = decoded(rollouts, tokenizer)
        rewards = [self.task.reward(problem, text) for problem, text in zip(problems, texts, strict=True)]
        return torch.tensor(rewards), RewardMetrics()


@dataclass
class Scripted:
    """An engine that answers a prompt with its next scripted text, and records the calls."""

    answers: dict[str, list[str]]
    calls: list[tuple[list[str], int]] = field(default_factory=list)

    def sleep(self): ...

    def generate(self, prompts, sampling, seed):
        words = ["".join(map(chr, prompt)) for prompt in prompts]
        self.calls.append((words, seed))
        completions = [[ord(c) for c in self.answers[word].pop(0)] + [EOS] for word in words]
        width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
        ids, mask = torch.zeros(len(prompts), width, dtype=torch.long), torch.zeros(len(prompts), width)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            ids[row, : len(prompt) + len(completion)] = torch.tensor(prompt + completion)
            mask[row, len(prompt) : len(prompt) + len(completion)] = 1.0
        starts = torch.tensor([len(prompt) for prompt in prompts])
        return BatchedDataDict(
            input_ids=ids,
            prompt_lengths=starts,
            input_lengths=starts + torch.tensor([len(completion) for completion in completions]),
            token_mask=mask,
            sample_mask=torch.ones(len(prompts)),
            generation_logprobs=-mask,
            temperature=torch.ones(len(prompts)),
            stopped=torch.ones(len(prompts), dtype=torch.bool),
            weight_version=torch.ones(len(prompts), dtype=torch.long),
        )


def stage_of_a_sampler(**attributes: object) -> SimpleNamespace:
    """Return what a `Sampler` needs of a stage: these attributes, and batches that have the numbers of their steps."""
    ignored = lambda *_: None  # noqa: E731
    return SimpleNamespace(
        **attributes, batch_number=int, use_loader=ignored, keep=ignored, rollout_files=Path("unused")
    )

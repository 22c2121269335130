"""Decode sampled tokens, and score the texts with a task's rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.tasks import Problem, Task
from rl_megatron.data.tokenizer import Tokenizer


def completions(rollouts: BatchedDataDict, tokenizer: Tokenizer) -> list[str]:
    """Return the sampled text of each sequence, without special tokens."""
    spans = zip(
        rollouts["input_ids"].tolist(),
        rollouts["prompt_lengths"].tolist(),
        rollouts["input_lengths"].tolist(),
        strict=True,
    )
    return [tokenizer.decode(ids[start:stop]) for ids, start, stop in spans]


def score(task: Task, problems: Sequence[Problem], texts: Sequence[str]) -> Tensor:
    """Return the task's reward of each text, [B] fp32, the same on every rank. Collective.

    Only rank 0 computes the rewards and broadcasts them, because a verifier with a time limit or a judge may give
    different rewards to the same text.

    Args:
        task: The task.
        problems: One problem for each text.
        texts: The completions.

    Raises:
        ConfigError: A reward is NaN or infinite; the message names the task, the prompt and the completion.
        Exception: The task raises it on rank 0; it is raised on every rank.
    """
    answer: list = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            answer[0] = [task.reward(problem, text) for problem, text in zip(problems, texts, strict=True)]
        except Exception as error:  # raised below, on every rank
            answer[0] = error
    if dist.is_initialized():
        dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    rewards = answer[0]
    for reward, problem, text in zip(rewards, problems, texts, strict=True):
        if not math.isfinite(reward):
            raise ConfigError(
                f"task {task.name!r} gave the reward {reward} for prompt {problem.prompt!r} and completion {text!r}; "
                "a reward must be finite: correct the task's reward()"
            )
    return torch.tensor(rewards, dtype=torch.float32)

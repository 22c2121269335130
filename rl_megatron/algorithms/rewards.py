"""From sampled tokens to rewards."""

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
    """The sampled text of each row, special tokens left out."""
    spans = zip(
        rollouts["input_ids"].tolist(),
        rollouts["prompt_lengths"].tolist(),
        rollouts["input_lengths"].tolist(),
        strict=True,
    )
    return [tokenizer.decode(ids[start:stop]) for ids, start, stop in spans]


def score(task: Task, problems: Sequence[Problem], texts: Sequence[str]) -> Tensor:
    """The task's reward of each text, [B] fp32, the same on every rank: rank 0 asks the task and tells the others, as
    a verifier with a time limit or a judge may answer differently when asked twice.

    Raises: ConfigError where a reward is NaN or infinite, naming the task, the prompt and the completion.
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
                "a reward must be finite: mend the task's reward()"
            )
    return torch.tensor(rewards, dtype=torch.float32)

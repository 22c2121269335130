"""Prompts → scored rollouts with advantages: what a policy-gradient update learns from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_megatron.algorithms.advantages import group_relative, informative_groups
from rl_megatron.algorithms.rewards import completions, score
from rl_megatron.config.schema import GRPOConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.tasks import Problem, Task
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.generation.interfaces import RolloutEngine, Sampling


def sample_groups(
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    task: Task,
    problems: Sequence[Problem],
    sampling: Sampling,
    seed: int,
    algorithm: GRPOConfig,
) -> BatchedDataDict:
    """`samples_per_prompt` completions per problem, groups contiguous, with `rewards` [B] and `advantages` [B, S]."""
    repeated = [problem for problem in problems for _ in range(algorithm.samples_per_prompt)]
    prompts = {problem.prompt: tokenizer.encode(problem.prompt) for problem in problems}
    rollouts = engine.generate([prompts[problem.prompt] for problem in repeated], sampling, seed)
    rollouts["rewards"] = score(task, repeated, completions(rollouts, tokenizer))
    advantages = group_relative(
        rollouts["rewards"],
        algorithm.samples_per_prompt,
        leave_one_out=algorithm.leave_one_out,
        normalize_std=algorithm.normalize_std,
    )
    rollouts["advantages"] = advantages[:, None] * rollouts["token_mask"]
    return rollouts


def keep_informative(rollouts: BatchedDataDict, group_size: int) -> BatchedDataDict:
    """The rows of groups whose rewards differ."""
    kept = informative_groups(rollouts["rewards"], group_size)
    return rollouts.select_indices(kept.repeat_interleave(group_size).nonzero()[:, 0].tolist())


def join(parts: Sequence[BatchedDataDict], max_rows: int) -> BatchedDataDict:
    """Several rounds of rollouts as one batch of at most `max_rows` rows."""
    joined = BatchedDataDict.from_batches(list(parts)) if len(parts) > 1 else parts[0]
    return joined.slice(0, min(max_rows, joined.size))


def statistics(rollouts: BatchedDataDict, group_size: int) -> dict[str, float]:
    """What the rollouts were like: mean reward, completion length, share of ended rows and of informative groups."""
    lengths: Tensor = (rollouts["input_lengths"] - rollouts["prompt_lengths"]).float()
    return {
        "reward": rollouts["rewards"].mean().item(),
        "completion_tokens": lengths.mean().item(),
        "stopped": rollouts["stopped"].float().mean().item(),
        "informative_groups": informative_groups(rollouts["rewards"], group_size).float().mean().item(),
    }


def logprob_mismatch(rollouts: BatchedDataDict) -> dict[str, float]:
    """How far the engine's logprobs are from the trainer's, over sampled tokens: 0 up to rounding when both see the
    same weights."""
    sampled = rollouts["token_mask"].bool()
    difference = (rollouts["prev_logprobs"] - rollouts["generation_logprobs"]).abs()
    difference = torch.where(sampled, difference, 0.0)
    return {
        "mismatch_mean": (difference.sum() / sampled.sum().clamp(min=1)).item(),
        "mismatch_max": difference.max().item(),
    }

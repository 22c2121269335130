"""Online DPO: sample answers for each prompt, and learn to prefer the highest-reward one over the lowest-reward one.

Source: Guo et al. 2024, "Direct Language Model Alignment from Online AI Feedback" (arXiv:2402.04792).
"""

from __future__ import annotations

import torch

from rl_megatron.algorithms.pairs import LOGPROB_PAIRS, add_reference_logprobs, uses_reference
from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.algorithms.rollout import check_problems
from rl_megatron.batching.trajectory_index import TrajectoryIndex
from rl_megatron.config.algorithms import OnlineDPOConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.losses.registry import configured_loss
from rl_megatron.rollouts.sampler import Sampler, share_rollouts
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy

_KEYS = ("input_ids", "input_lengths", "token_mask", "sample_mask", "temperature", "rewards")


@register_algorithm(
    OnlineDPOConfig,
    loss=LOGPROB_PAIRS,
    uses_reference=uses_reference,
    check_data=check_problems,
    progress_metric="reward",
)
def online_dpo(loop: Loop, policy: MegatronPolicy, sampler: Sampler, algorithm: OnlineDPOConfig) -> None:
    """Train the policy by online DPO, or by another loss that compares the answers of pairs."""
    loss_fn, reference = configured_loss(loop.config.loss), uses_reference(loop.config)
    if reference:
        policy.freeze_reference()
    for step in loop.steps():
        rollouts, outcome = sampler.collect(step)
        pairs = select_pairs(share_rollouts(rollouts), algorithm.samples_per_prompt)
        if reference:
            pairs = add_reference_logprobs(pairs, policy)
        loop.record(step, outcome | loop.train(step, pairs, loss_fn))


def select_pairs(rollouts: BatchedDataDict, group_size: int) -> BatchedDataDict:
    """Return a pair for each group: its sample with the highest reward, then the one with the lowest.

    Among equal rewards, the first sample is chosen. Samples that failed (sample_mask 0) are left out. The pair of a
    group whose rewards are all equal has the sample_mask 0. The samples of a group are contiguous.
    """
    if not TrajectoryIndex(rollouts).all_alone:
        raise ConfigError(
            "algorithm=online_dpo compares whole sequences, but a trajectory of this step has several; set "
            "rollout.on_rewrite=keep"
        )
    rewards = rollouts["rewards"].float().view(-1, group_size)
    counts = rollouts["sample_mask"].view(-1, group_size) != 0
    best = torch.where(counts, rewards, -torch.inf).argmax(1, keepdim=True)
    worst = torch.where(counts, rewards, torch.inf).argmin(1, keepdim=True)
    first = torch.arange(len(rewards))[:, None] * group_size
    chosen = rollouts.select_indices((first + torch.cat([best, worst], 1)).flatten().tolist())
    pairs = BatchedDataDict({key: chosen[key] for key in _KEYS if key in chosen})
    differ = rewards.gather(1, best) > rewards.gather(1, worst)
    pairs["sample_mask"] = pairs["sample_mask"] * differ.expand(-1, 2).flatten()
    return pairs

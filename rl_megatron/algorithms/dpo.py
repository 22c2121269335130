"""DPO: raise the likelihood of preferred answers over rejected ones, measured against the policy it began as.

Source: Rafailov et al. 2023, arXiv:2305.18290.
"""

from __future__ import annotations

from itertools import chain

from rl_megatron.algorithms.inputs import heldout_pairs, preference_rows
from rl_megatron.algorithms.stage import Stage
from rl_megatron.losses.registry import configured_loss


def dpo(stage: Stage) -> None:
    loss_fn = configured_loss(stage.config.loss)
    dataset = preference_rows(stage.config, stage.tokenizer)
    if stage.config.algorithm.precompute_reference:
        heldout = heldout_pairs(stage.config, stage.tokenizer).batch
        stage.policy.record_reference(stage.reference_logprobs, chain([heldout], stage.distinct_batches(dataset)))
    else:
        stage.policy.freeze_reference()
    for step, pairs in stage.batches(dataset):
        reference = stage.policy.get_reference_policy_logprobs(pairs)["reference_logprobs"]
        pairs["reference_policy_logprobs"] = reference.roll(-1, dims=1)  # DPO losses want them beside their context
        stage.record(step, stage.train(step, pairs, loss_fn))

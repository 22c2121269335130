"""DPO: raise the likelihood of chosen answers over rejected answers, relative to the initial policy.

Source: Rafailov et al. 2023, arXiv:2305.18290.
"""

from __future__ import annotations

from itertools import chain

from rl_megatron.algorithms.pairs import pair_loss
from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.algorithms.stage import Stage
from rl_megatron.config.algorithms import DPOConfig
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.sources import HeldoutBatch, build_source
from rl_megatron.data.stage_loader import dataset_loader
from rl_megatron.losses.contract import LossInputType
from rl_megatron.losses.registry import configured_loss

_LOSS = pair_loss(
    LossInputType.LOGPROB, "logprobs of pairs", "dpo or ipo", more_keys=frozenset({"reference_policy_logprobs"})
)


def _uses_reference(stage: StageConfig) -> bool:
    return True


@register_algorithm(DPOConfig, loss=_LOSS, uses_reference=_uses_reference)
def dpo(stage: Stage, algorithm: DPOConfig) -> None:
    """Train the stage's policy by DPO, or by another loss that compares pairs with a reference policy."""
    loss_fn = configured_loss(stage.config.loss)
    loader = dataset_loader(stage.config, stage.tokenizer)
    if algorithm.precompute_reference:
        heldout = build_source(stage.config).heldout(stage.tokenizer)
        evaluated = [heldout.batch] if isinstance(heldout, HeldoutBatch) else []
        stage.policy.record_reference(stage.reference_logprobs, chain(evaluated, stage.distinct_batches(loader)))
    else:
        stage.policy.freeze_reference()
    for step, pairs in stage.batches(loader):
        reference = stage.policy.get_reference_policy_logprobs(pairs)["reference_logprobs"]
        pairs["reference_policy_logprobs"] = reference.roll(-1, dims=1)  # in DPO losses entry t is of token t + 1
        stage.record(step, stage.train(step, pairs, loss_fn))

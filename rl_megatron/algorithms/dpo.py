"""DPO and its relatives: raise the likelihood of chosen answers over rejected answers.

A loss such as SimPO compares the answers without a reference policy, and then there is none.

Source: Rafailov et al. 2023, arXiv:2305.18290.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from rl_megatron.algorithms.loop import Loop
from rl_megatron.algorithms.owned import owned_batches
from rl_megatron.algorithms.pairs import LOGPROB_PAIRS, uses_reference, with_reference
from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.config.algorithms import DPOConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.sources import HeldoutBatch, build_source
from rl_megatron.data.stage_loader import dataset_loader
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import check_dataset
from rl_megatron.losses.registry import configured_loss


def _check_data(stage: StageConfig, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """Check the pairs, and that a reference is precomputed only for a loss that reads it.

    Raises:
        ConfigError: See `check_dataset`; or algorithm.precompute_reference has no effect.
    """
    algorithm: DPOConfig = stage.algorithm  # pyright: ignore[reportAssignmentType] registered only for this class
    if algorithm.precompute_reference and not uses_reference(stage):
        raise ConfigError(
            f"algorithm.precompute_reference=true has no effect: loss.name={stage.loss['name']} compares answers "
            "without a reference policy; set it to false"
        )
    return check_dataset(stage, tokenizer)


@register_algorithm(DPOConfig, loss=LOGPROB_PAIRS, uses_reference=uses_reference, check_data=_check_data)
def dpo(stage: Loop, algorithm: DPOConfig) -> None:
    """Train the stage's policy by DPO, or by another loss that compares the answers of pairs."""
    loss_fn, reference = configured_loss(stage.config.loss), uses_reference(stage.config)
    loader = dataset_loader(stage.config, stage.tokenizer)
    if algorithm.precompute_reference:
        heldout = build_source(stage.config).heldout(stage.tokenizer)
        evaluated = [heldout.batch] if isinstance(heldout, HeldoutBatch) else []
        stage.policy.record_reference(stage.reference_logprobs, chain(evaluated, stage.distinct_batches(loader)))
    elif reference:
        stage.policy.freeze_reference()
    for step, pairs in owned_batches(stage, loader):
        if reference:
            pairs = with_reference(pairs, stage.policy)
        stage.record(step, stage.train(step, pairs, loss_fn))

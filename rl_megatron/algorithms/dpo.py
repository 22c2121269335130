"""DPO and its relatives: raise the likelihood of chosen answers relative to that of rejected answers.

A reference policy is kept only if the loss needs it; SimPO, for example, does not.

Source: Rafailov et al. 2023, arXiv:2305.18290.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from rl_megatron.algorithms.pairs import LOGPROB_PAIRS, add_reference_logprobs, uses_reference
from rl_megatron.algorithms.registry import register_algorithm
from rl_megatron.config.algorithms import DPOConfig
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import StageConfig
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.data.loader import DataLoader
from rl_megatron.data.sources import HeldoutBatch, build_source
from rl_megatron.data.tokenizer import Tokenizer
from rl_megatron.data.training_data import check_dataset
from rl_megatron.losses.registry import configured_loss
from rl_megatron.training.loop import Loop
from rl_megatron.training.megatron_policy import MegatronPolicy


def _check_data(stage: StageConfig, tokenizer: Tokenizer) -> Sequence[tuple[int, ...]]:
    """Check the pairs, and refuse to precompute a reference that the loss does not read."""
    algorithm: DPOConfig = stage.algorithm  # pyright: ignore[reportAssignmentType] registered only for this class
    if algorithm.precompute_reference and not uses_reference(stage):
        raise ConfigError(
            f"algorithm.precompute_reference=true has no effect: loss.name={stage.loss['name']} compares answers "
            "without a reference policy; set it to false"
        )
    return check_dataset(stage, tokenizer)


@register_algorithm(DPOConfig, loss=LOGPROB_PAIRS, uses_reference=uses_reference, check_data=_check_data)
def dpo(loop: Loop, policy: MegatronPolicy, data: DataLoader[BatchedDataDict], algorithm: DPOConfig) -> None:
    """Train the policy by DPO, or by another loss that compares the answers of pairs."""
    loss_fn, reference = configured_loss(loop.config.loss), uses_reference(loop.config)
    if algorithm.precompute_reference:
        heldout = build_source(loop.config).heldout(loop.tokenizer)
        evaluated = [heldout.batch] if isinstance(heldout, HeldoutBatch) else []
        policy.record_reference(loop.reference_logprobs, chain(evaluated, loop.distinct_batches(data)))
    elif reference:
        policy.freeze_reference()
    for step, pairs in loop.batches(data):
        if reference:
            pairs = add_reference_logprobs(pairs, policy)
        loop.record(step, loop.train(step, pairs, loss_fn))

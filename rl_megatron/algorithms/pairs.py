"""The common parts of algorithms that learn from preference pairs: loss requirements, and the reference's logprobs."""

from __future__ import annotations

from rl_megatron.algorithms.registry import LossNeeds
from rl_megatron.config.schema import StageConfig
from rl_megatron.losses.contract import LossFunction, LossInputType
from rl_megatron.losses.registry import configured_loss
from rl_megatron.policy.interfaces import BatchT, PolicyInterface

_REFERENCE = "reference_policy_logprobs"
PAIR_KEYS = frozenset({"input_ids", "input_lengths", "token_mask", "sample_mask"})


def pair_loss(input_type: LossInputType, uses: str, choices: str, more_keys: frozenset[str] = frozenset()) -> LossNeeds:
    """Return the requirements of an algorithm whose loss compares the two answers of a pair.

    `input_type` is the model output that the loss must read. `more_keys` are keys of the algorithm's batches in
    addition to `PAIR_KEYS`.
    """

    def suits(loss_fn: LossFunction) -> bool:
        return getattr(loss_fn, "group_size", 1) == 2 and loss_fn.input_type is input_type

    return LossNeeds(uses, suits, PAIR_KEYS | more_keys, choices)


LOGPROB_PAIRS = pair_loss(
    LossInputType.LOGPROB, "logprobs of pairs", "dpo, ipo, simpo, cpo or orpo", more_keys=frozenset({_REFERENCE})
)


def uses_reference(stage: StageConfig) -> bool:
    """Return whether the stage's loss may read the reference's logprobs; any loss without `required_keys` may."""
    return _REFERENCE in getattr(configured_loss(stage.loss), "required_keys", (_REFERENCE,))


def add_reference_logprobs(batch: BatchT, policy: PolicyInterface) -> BatchT:
    """Add the reference's logprobs to a batch, and return it.

    Entry t corresponds to token t+1, as the losses of pairs need.
    """
    logprobs = policy.get_reference_policy_logprobs(batch)["reference_logprobs"]
    batch[_REFERENCE] = logprobs.roll(-1, dims=1)
    return batch

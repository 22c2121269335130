"""NeMo RL's import paths, answered by this package, so that code written against NeMo RL's losses runs unchanged:

    import rl_megatron.compat.nemo_rl as compat
    compat.install()
    from nemo_rl.algorithms.loss_functions import ClippedPGLossFn  # is rl_megatron.losses.ClippedPGLossFn

`MODULES` is everything that is answered, for both generations of NeMo RL: losses in `algorithms.loss_functions` that
take logits, and losses in `algorithms.loss` that take log-probabilities. Names that changed between them are the same
object.

What is different, on purpose:

- Settings are strict. A key that NeMo RL would pass over is a KeyError that names the nearest one; a truncation type
  without its bound is an error. The `dpo` section of a NeMo RL recipe, which holds the trainer's keys as well, may go
  to `DPOLossFn` as it is. Settings are dataclasses, and plain dicts pass.
- A mean divides by the count, not by the count plus 1e-8, and is 0 where nothing counts. What is masked is not read:
  NaN there does no harm. The log-ratio log π/π_prev saturates at ±20.
- The backward pass writes the gradient over the logits. Call one loss on them, and call it before anything else that
  saved them for its own backward; logits that are still needed afterwards, or by a second loss, want a clone.
- Under context parallelism the gradient is whole as it is: a `loss / cp_size` that makes up for NeMo RL's gather, whose
  backward adds up the ranks' equal losses, has to go.
- `DraftCrossEntropyLossFn` gives (loss, metrics), and takes `vocab_parallel_group` by name. The
  `use_fused_linear_logprobs` of the losses is not there, and settings are in `loss.cfg`, not on the loss itself.
  `prepare_loss_input` gives 0 at masked tokens. `num_valid_samples` is the sum of sample_mask throughout.
- The KL's gradient is that of NeMo RL's newer generation in both (see `functional.score_function_weight`), and
  `positive_example_nll_weight` divides by a global count, not by the microbatch's own (see `ClippedPGLossFn`).
- A batch that carries `temperature` has its logits divided by it.

Source: NVIDIA NeMo RL 0.3 to 0.8, its documentation of these modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron import data, losses
from rl_megatron.compat.nemo_rl import import_table
from rl_megatron.logprobs import Sharding, next_token_stats
from rl_megatron.losses.base import token_scores
from rl_megatron.losses.functional import kl_penalty, masked_mean
from rl_megatron.policy import interfaces as policy

# The keys of a recipe's `dpo` section that are its trainer's, not its loss's.
_DPO_TRAINER_KEYS = frozenset(
    "max_num_epochs max_num_steps val_period val_batches val_global_batch_size val_micro_batch_size val_at_start "
    "val_at_end seed".split()
)


class DPOLossFn(losses.DPOLossFn):
    """`rl_megatron.losses.DPOLossFn`, which may be given a recipe's whole `dpo` section."""

    def __init__(self, cfg: Any = None) -> None:
        if isinstance(cfg, Mapping):
            cfg = {key: cfg[key] for key in cfg if key not in _DPO_TRAINER_KEYS}
        super().__init__(cfg)


class MseValueLossFn(losses.MSEValueLoss):
    """`rl_megatron.losses.MSEValueLoss` on values that are aligned with `returns` already: NeMo RL's workers shift what
    the value head says before the loss sees it, entry t being the value before token t."""

    def read_output(self, output: Tensor, data: Mapping[str, Any], sharding: Sharding) -> dict[str, Tensor]:
        return {"next_token_values": token_scores(output, data, sharding, self)[:, 1:]}


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: str = "k3",
    input_clamp_value: float | None = 20.0,
    output_clamp_value: float | None = 10.0,
    importance_sampling_weights: Tensor | None = None,
) -> Tensor:
    """`rl_megatron.losses.kl_penalty` under NeMo RL's names."""
    return kl_penalty(
        logprobs, logprobs_reference, kl_type, input_clamp_value, output_clamp_value, importance_sampling_weights
    )


def calculate_kl_penalty_joschu2020(logprobs_policy: Tensor, logprobs_reference: Tensor) -> Tensor:
    """k3 without clamps."""
    return kl_penalty(logprobs_policy, logprobs_reference, "k3", input_clamp=None, output_clamp=None)


def prepare_loss_input(
    logits: Tensor,
    data: Mapping[str, Any],
    loss_fn: losses.LossFunction,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """(Keywords that `loss_fn` takes from a model's output, data). `loss_fn` may be one of ours, or any object with an
    `input_type` of LOGPROB or LOGIT. The rank is the group's own and not read.

    Shapes: logits as in `next_token_stats`; next_token_logprobs [B, S-1].
    Raises: ValueError for another input type.
    """
    return _read_output(logits, data, loss_fn, Sharding(vocab_parallel_group, context_parallel_group)), data


def prepare_packed_loss_input(
    logits: Tensor,
    data: Mapping[str, Any],
    loss_fn: losses.LossFunction,
    cu_seqlens_q: Tensor,
    cu_seqlens_q_padded: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """`prepare_loss_input` of packed logits, which are [1, T/cp, V/tp]; data stays [B, S]."""
    sharding = Sharding(
        vocab_parallel_group, context_parallel_group, None, _offsets(cu_seqlens_q), _offsets(cu_seqlens_q_padded)
    )
    return _read_output(logits, data, loss_fn, sharding), data


def _read_output(
    logits: Tensor, data: Mapping[str, Any], loss_fn: losses.LossFunction, sharding: Sharding
) -> dict[str, Tensor]:
    if isinstance(loss_fn, losses.Loss):
        return loss_fn.read_output(logits, data, sharding)
    if loss_fn.input_type is losses.LossInputType.LOGPROB:
        return {"next_token_logprobs": next_token_stats(logits, data["input_ids"], sharding).logprobs}
    if loss_fn.input_type is losses.LossInputType.LOGIT:
        return {"logits": logits}
    raise ValueError(f"{type(loss_fn).__name__}: the input of a loss with {loss_fn.input_type} is its own to prepare")


def wrap_loss_fn_with_input_preparation(
    next_token_logits: Tensor,
    data: Mapping[str, Any],
    global_valid_seqs: Tensor | None,
    global_valid_toks: Tensor | None,
    loss_fn: losses.LossFunction,
    prepare_fn: Callable[..., tuple[dict[str, Tensor], Mapping[str, Any]]] = prepare_loss_input,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """loss_fn on what prepare_fn makes of the logits."""
    inputs, data = prepare_fn(
        logits=next_token_logits,
        data=data,
        loss_fn=loss_fn,
        vocab_parallel_rank=vocab_parallel_rank,
        vocab_parallel_group=vocab_parallel_group,
        context_parallel_group=context_parallel_group,
    )
    return loss_fn(data=data, global_valid_seqs=global_valid_seqs, global_valid_toks=global_valid_toks, **inputs)


class PackedLossWrapper(losses.SequencePackingLossWrapper):
    """`rl_megatron.losses.SequencePackingLossWrapper` as `nemo_rl.algorithms.loss` constructs it: with the groups, and
    with a `prepare_fn`, one of the two above. It reads the packed logits in one pass whichever it is.

    Raises: TypeError for another prepare_fn.
    """

    def __init__(
        self,
        loss_fn: losses.LossFunction,
        prepare_fn: Callable[..., Any],
        cu_seqlens_q: Tensor | tuple[int, ...],
        cu_seqlens_q_padded: Tensor | tuple[int, ...] | None = None,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: dist.ProcessGroup | None = None,
        context_parallel_group: dist.ProcessGroup | None = None,
    ) -> None:
        if prepare_fn not in (prepare_loss_input, prepare_packed_loss_input):
            raise TypeError(
                f"prepare_fn={prepare_fn!r}: packed logits are read by prepare_loss_input or prepare_packed_loss_input "
                "of nemo_rl.algorithms.loss"
            )
        super().__init__(loss_fn, _offsets(cu_seqlens_q), _offsets(cu_seqlens_q_padded))
        self._groups = (vocab_parallel_rank, vocab_parallel_group, context_parallel_group)

    def __call__(
        self,
        next_token_logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        return super().__call__(next_token_logits, data, global_valid_seqs, global_valid_toks, *self._groups)


def _offsets(cu_seqlens: Tensor | tuple[int, ...] | None) -> Tensor | None:
    return None if cu_seqlens is None else torch.as_tensor(cu_seqlens)


_INTERFACES = {"LossFunction": losses.LossFunction, "LossType": losses.LossType}
_LOSSES = {
    "ClippedPGLossConfig": losses.ClippedPGLossConfig,
    "ClippedPGLossDataDict": losses.ClippedPGLossDataDict,
    "ClippedPGLossFn": losses.ClippedPGLossFn,
    "DPOLossConfig": losses.DPOLossConfig,
    "DPOLossDataDict": losses.DPOLossDataDict,
    "DPOLossFn": DPOLossFn,
    "DistillationLossConfig": losses.DistillationLossConfig,
    "DistillationLossDataDict": losses.DistillationLossDataDict,
    "DistillationLossFn": losses.DistillationLossFn,
    "DraftCrossEntropyLossFn": losses.DraftCrossEntropyLossFn,
    "MseValueLossConfig": losses.MSEValueLossConfig,
    "MseValueLossFn": MseValueLossFn,
    "NLLLoss": losses.NLLLoss,
    "NLLLossFn": losses.NLLLoss,
    "PreferenceLoss": losses.PreferenceLoss,
    "PreferenceLossDataDict": losses.PreferenceLossDataDict,
    "PreferenceLossFn": losses.PreferenceLoss,
    "Tensor": TypeVar("Tensor", bound=torch.Tensor),
}
_LOGITS_WRAPPER = {"SequencePackingLossWrapper": losses.SequencePackingLossWrapper}
_WRAPPERS = {
    "SequencePackingFusionLossWrapper": PackedLossWrapper,
    "SequencePackingLossWrapper": PackedLossWrapper,
    "wrap_loss_fn_with_input_preparation": wrap_loss_fn_with_input_preparation,
}
_INPUTS = {"prepare_loss_input": prepare_loss_input, "prepare_packed_loss_input": prepare_packed_loss_input}

MODULES: dict[str, dict[str, Any]] = {
    "nemo_rl.algorithms.interfaces": _INTERFACES,
    "nemo_rl.algorithms.loss": _LOSSES | _WRAPPERS | _INPUTS,
    "nemo_rl.algorithms.loss.interfaces": _INTERFACES | {"LossInputType": losses.LossInputType},
    "nemo_rl.algorithms.loss.loss_functions": _LOSSES,
    "nemo_rl.algorithms.loss.loss_input": _INPUTS,
    "nemo_rl.algorithms.loss.utils": _INPUTS,
    "nemo_rl.algorithms.loss.wrapper": _WRAPPERS,
    "nemo_rl.algorithms.loss_functions": _LOSSES | _LOGITS_WRAPPER,
    "nemo_rl.algorithms.utils": {
        "calculate_kl": calculate_kl,
        "calculate_kl_penalty_joschu2020": calculate_kl_penalty_joschu2020,
        "masked_mean": masked_mean,
    },
    "nemo_rl.distributed.batched_data_dict": {
        "BatchedDataDict": data.BatchedDataDict,
        "DynamicBatchingArgs": data.DynamicBatchingArgs,
        "SequencePackingArgs": data.SequencePackingArgs,
        "SlicedDataDict": data.BatchedDataDict,
    },
    "nemo_rl.models.policy.interfaces": {
        "ColocatablePolicyInterface": policy.ColocatablePolicyInterface,
        "LogprobOutputSpec": policy.LogprobOutputSpec,
        "PolicyInterface": policy.PolicyInterface,
        "ReferenceLogprobOutputSpec": policy.ReferenceLogprobOutputSpec,
        "TopkLogitsOutputSpec": policy.TopkLogitsOutputSpec,
    },
}


def install(replace: bool = False) -> None:
    """From here on `import nemo_rl.…` finds the modules of `MODULES`. A second call changes nothing.

    Args:
        replace: stand in for a NeMo RL that is installed as well. Its other modules are then out of reach: they would
            bring its own BatchedDataDict and losses along.

    Raises: ImportError if NeMo RL is installed and `replace` is not set, or if it is imported already.
    """
    import_table.answer("nemo_rl", MODULES, replace)

"""NeMo RL's second generation: from a model's logits to what a loss takes, padded and packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron import losses
from rl_megatron.compat.nemo_rl.errors import require
from rl_megatron.logprobs import Sharding, next_token_stats


def prepare_loss_input(
    logits: Tensor,
    data: Mapping[str, Any],
    loss_fn: losses.LossFunction,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: dist.ProcessGroup | None = None,
    context_parallel_group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Return (keywords that `loss_fn` takes from a model's output, data).

    `loss_fn` may be one of ours, or any object with an `input_type` of LOGPROB or LOGIT.

    Shapes: logits as in `next_token_stats`; next_token_logprobs [B, S-1].

    Raises:
        RuleError: vocab_parallel_group comes without vocab_parallel_rank.
        ValueError: the object has another input type.
    """
    _require_rank(vocab_parallel_rank, vocab_parallel_group)
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
    """Return what `prepare_loss_input` does for packed logits, which are [1, T/cp, V/tp]; data stays [B, S]."""
    _require_rank(vocab_parallel_rank, vocab_parallel_group)
    sharding = Sharding(
        vocab_parallel_group, context_parallel_group, None, *_offsets(cu_seqlens_q, cu_seqlens_q_padded)
    )
    return _read_output(logits, data, loss_fn, sharding), data


def _require_rank(rank: int | None, group: dist.ProcessGroup | None) -> None:
    require(
        group is None or rank is not None, "vocab_parallel_rank must be provided when vocab_parallel_group is provided"
    )


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
    """Return `loss_fn` of what `prepare_fn` makes of the logits."""
    inputs, data = prepare_fn(
        logits=next_token_logits,
        data=data,
        loss_fn=loss_fn,
        vocab_parallel_rank=vocab_parallel_rank,
        vocab_parallel_group=vocab_parallel_group,
        context_parallel_group=context_parallel_group,
    )
    # Which counts may be None is the loss's to say.
    counts: dict[str, Any] = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
    return loss_fn(data=data, **counts, **inputs)


class PackedLossWrapper(losses.SequencePackingLossWrapper):
    """`rl_megatron.losses.SequencePackingLossWrapper` as `nemo_rl.algorithms.loss` constructs it.

    It takes the groups, and a `prepare_fn`, which must be one of the two above. It reads the packed logits in one pass
    whichever it is.
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
        super().__init__(loss_fn, *_offsets(cu_seqlens_q, cu_seqlens_q_padded))
        self._groups = (vocab_parallel_rank, vocab_parallel_group, context_parallel_group)

    def __call__(
        self,
        next_token_logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        return super().__call__(next_token_logits, data, global_valid_seqs, global_valid_toks, *self._groups)


def _offsets(
    cu_seqlens: Tensor | tuple[int, ...], padded: Tensor | tuple[int, ...] | None
) -> tuple[Tensor, Tensor | None]:
    return torch.as_tensor(cu_seqlens), None if padded is None else torch.as_tensor(padded)

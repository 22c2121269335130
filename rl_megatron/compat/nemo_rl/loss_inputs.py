"""NeMo RL's functions and wrappers that compute the inputs of newer losses from padded or packed logits."""

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
    """Return (the keyword arguments of `loss_fn` that are computed from a model's output, data).

    Shapes: logits as in `next_token_stats`; next_token_logprobs [B, S-1].

    Args:
        logits: The model's output.
        data: The batch.
        loss_fn: A `Loss`, or any object with the `input_type` LOGPROB or LOGIT.
        vocab_parallel_rank: This process's rank in vocab_parallel_group.
        vocab_parallel_group: The tensor-parallel group; None: logits are not sharded.
        context_parallel_group: The context-parallel group; None: sequences are not cut.

    Raises:
        RuleError: vocab_parallel_group is given without vocab_parallel_rank.
        ValueError: The object has another input type.
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
    """Return the same as `prepare_loss_input`, for packed logits [1, T/cp, V/tp]. data stays [B, S].

    Args:
        logits: The model's packed output.
        data: The batch.
        loss_fn: See `prepare_loss_input`.
        cu_seqlens_q: The cumulative lengths of the sequences, [B+1].
        cu_seqlens_q_padded: The cumulative padded lengths; None: sequences are not padded.
        vocab_parallel_rank: This process's rank in vocab_parallel_group.
        vocab_parallel_group: The tensor-parallel group; None: logits are not sharded.
        context_parallel_group: The context-parallel group; None: sequences are not cut.
    """
    _require_rank(vocab_parallel_rank, vocab_parallel_group)
    sharding = Sharding(
        vocab_parallel_group, context_parallel_group, None, *_offsets(cu_seqlens_q, cu_seqlens_q_padded)
    )
    return _read_output(logits, data, loss_fn, sharding), data


def _require_rank(rank: int | None, group: dist.ProcessGroup | None) -> None:
    """Raise `RuleError` if a group is given without a rank."""
    require(
        group is None or rank is not None, "vocab_parallel_rank must be provided when vocab_parallel_group is provided"
    )


def _read_output(
    logits: Tensor, data: Mapping[str, Any], loss_fn: losses.LossFunction, sharding: Sharding
) -> dict[str, Tensor]:
    """Return the keyword arguments of a loss that are computed from logits."""
    if isinstance(loss_fn, losses.Loss):
        return loss_fn.read_output(logits, data, sharding)
    if loss_fn.input_type is losses.LossInputType.LOGPROB:
        return {"next_token_logprobs": next_token_stats(logits, data["input_ids"], sharding).logprobs}
    if loss_fn.input_type is losses.LossInputType.LOGIT:
        return {"logits": logits}
    raise ValueError(
        f"{type(loss_fn).__name__} has input_type={loss_fn.input_type}, but a loss function that is not an "
        "rl_megatron.losses.Loss must have LOGPROB or LOGIT"
    )


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
    """Prepare the loss's inputs with `prepare_fn`, and return what `loss_fn` returns for them."""
    inputs, data = prepare_fn(
        logits=next_token_logits,
        data=data,
        loss_fn=loss_fn,
        vocab_parallel_rank=vocab_parallel_rank,
        vocab_parallel_group=vocab_parallel_group,
        context_parallel_group=context_parallel_group,
    )
    # The loss itself checks which counts may be None.
    counts: dict[str, Any] = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
    return loss_fn(data=data, **counts, **inputs)


class PackedLossWrapper(losses.SequencePackingLossWrapper):
    """`rl_megatron.losses.SequencePackingLossWrapper` with the constructor of `nemo_rl.algorithms.loss`.

    The constructor takes the groups and a `prepare_fn`, which must be one of the two functions above. With either
    function, the packed logits are read in one pass.
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
                f"prepare_fn={prepare_fn!r} must be prepare_loss_input or prepare_packed_loss_input of "
                "nemo_rl.algorithms.loss"
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
        """Return the loss and its metrics for a packed output and unpacked data."""
        return super().__call__(next_token_logits, data, global_valid_seqs, global_valid_toks, *self._groups)


def _offsets(
    cu_seqlens: Tensor | tuple[int, ...], padded: Tensor | tuple[int, ...] | None
) -> tuple[Tensor, Tensor | None]:
    """Return both offsets as tensors."""
    return torch.as_tensor(cu_seqlens), None if padded is None else torch.as_tensor(padded)

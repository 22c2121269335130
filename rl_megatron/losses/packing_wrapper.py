"""Run any loss on a packed output, which has all sequences of a batch one after the other in one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.logprobs import Sharding
from rl_megatron.logprobs.vocab_parallel import check
from rl_megatron.losses.base import Loss
from rl_megatron.losses.calling import describe_sharding
from rl_megatron.losses.contract import Count, LossFunction, Reduction
from rl_megatron.losses.foreign import as_loss, takes_logprobs


class SequencePackingLossWrapper:
    """A loss function that runs another loss function on a packed output, in one pass.

    Its value, metrics and gradient equal the sum of loss_fn over the pack's sequences (or pairs, if loss_fn compares
    pairs), each with its own slice of output and data:

        L = Σ_b loss_fn(output[start_b : start_b + length_b], data[b, : length_b])

    All three also equal the results of loss_fn on the same tokens in a padded batch, because parts that are divided by
    global counts add up.

    The wrapper is itself a `LossFunction`. Its data stays unpacked, [B, S]. Padding in the packed row has no effect,
    not even if it is NaN. A loss function that is not a `Loss` must have the input_type LOGPROB. It is called with
    next_token_logprobs [B, S-1] at the batch's temperature; those of masked tokens are 0.

    Shapes: cu_seqlens_q and cu_seqlens_q_padded are [B+1], counted over all context-parallel ranks. Sequence b of data
    has cu_seqlens_q[b+1] − cu_seqlens_q[b] tokens. They start at cu_seqlens_q_padded[b] of the packed row. The output
    is [1, T, V/tp] (scores: [1, T] or [1, T, 1]), or this rank's [1, T/cp, …] with a context_parallel_group. The length
    of each padded sequence is then a multiple of 2·cp, and sequences are cut zigzag.

    Args:
        loss_fn: The loss function to run.
        cu_seqlens_q: The cumulative lengths of the sequences.
        cu_seqlens_q_padded: The cumulative padded lengths of the sequences. None: sequences are not padded.

    Raises:
        TypeError: loss_fn is not a `Loss`, and its input_type is not LOGPROB.
        ValueError: In a call, cu_seqlens do not fit output and data, or a token that counts is after the end of its
            sequence. A call also raises what loss_fn raises.
    """

    def __init__(self, loss_fn: LossFunction, cu_seqlens_q: Tensor, cu_seqlens_q_padded: Tensor | None = None) -> None:
        if not isinstance(loss_fn, Loss) and not takes_logprobs(loss_fn):
            raise TypeError(
                f"SequencePackingLossWrapper does not know what {type(loss_fn).__name__} reads from a packed output; "
                "derive it from rl_megatron.losses.Loss, or set its input_type to LOGPROB and take next_token_logprobs"
            )
        self.loss_fn = loss_fn
        self.cu_seqlens_q, self.cu_seqlens_q_padded = cu_seqlens_q, cu_seqlens_q_padded
        self.loss_type, self.input_type = loss_fn.loss_type, loss_fn.input_type
        self._loss = as_loss(loss_fn)
        self.group_size = self._loss.group_size

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return self._loss.metric_reductions

    def __call__(
        self,
        next_token_logits: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Count,
        global_valid_toks: Count,
        vocab_parallel_rank: int | None = None,
        vocab_parallel_group: dist.ProcessGroup | None = None,
        context_parallel_group: dist.ProcessGroup | None = None,
        *,
        valid_vocab_size: int | None = None,
        **keywords: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        self._check_that_all_that_counts_is_packed(self._loss.mask(data).including_first)
        sharding = Sharding(
            vocab_parallel_group, context_parallel_group, valid_vocab_size, self.cu_seqlens_q, self.cu_seqlens_q_padded
        )
        keywords |= {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        keywords = describe_sharding(sharding) | {"vocab_parallel_rank": vocab_parallel_rank} | keywords
        return self._loss(next_token_logits, data=data, **keywords)

    def _check_that_all_that_counts_is_packed(self, mask: Tensor) -> None:
        """Raise ValueError if a token that counts is after the end of its sequence."""
        lengths = self.cu_seqlens_q.diff().to(mask.device)
        if lengths.shape != mask.shape[:1]:
            return  # the loss raises an error that names the shapes
        lost = (mask != 0) & (torch.arange(mask.shape[1], device=mask.device) >= lengths[:, None])
        check(
            ~lost.any(),
            lambda: (
                f"token_mask counts token {lost.nonzero()[0].tolist()}, but cu_seqlens_q ends the sequences after "
                f"{lengths.tolist()} tokens"
            ),
        )

"""Any loss on a packed output: all sequences of a batch one after the other in one row of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.logprobs import Sharding, next_token_stats
from rl_megatron.logprobs.vocab_parallel import check
from rl_megatron.losses.batch import TokenMask
from rl_megatron.losses.interfaces import Count, Loss, LossFunction, LossInputType, Reduction


class SequencePackingLossWrapper:
    """loss_fn on a packed output, in one pass: the value, metrics and gradient of summing loss_fn over the pack one
    sequence at a time (one pair at a time where it judges pairs), each with its own slice of output and data,

        L = Σ_b loss_fn(output[start_b : start_b + length_b], data[b, : length_b])

    and as loss_fn on the same tokens padded to rows of their own: parts divided by global counts add up.

    It is a `LossFunction` like the one it wraps, for data that stays unpacked, [B, S]. Whatever lies in the packed row
    outside the sequences, NaN included, has no effect. A loss function of another make is called with
    next_token_logprobs [B, S-1] (at temperature 1; 0 past the end of a sequence), if that is its input_type.

    Shapes: cu_seqlens_q, cu_seqlens_q_padded [B+1], counted over all context-parallel ranks: row b of data has
        cu_seqlens_q[b+1] − cu_seqlens_q[b] tokens, which start at cu_seqlens_q_padded[b] (default: cu_seqlens_q) of the
        packed row. The output is [1, T, V/tp] (scores: [1, T] or [1, T, 1]), with a context_parallel_group this rank's
        [1, T/cp, …], each padded sequence a multiple of 2·cp and cut zigzag.
    Raises: besides what the loss does, ValueError where cu_seqlens do not fit output and data, or a token that counts
        lies past the end of its sequence.
    """

    def __init__(self, loss_fn: LossFunction, cu_seqlens_q: Tensor, cu_seqlens_q_padded: Tensor | None = None) -> None:
        if not isinstance(loss_fn, Loss) and getattr(loss_fn, "input_type", None) is not LossInputType.LOGPROB:
            raise TypeError(
                f"SequencePackingLossWrapper cannot tell what {type(loss_fn).__name__} takes from a packed output: "
                "derive it from rl_megatron.losses.Loss, or let its input_type be LOGPROB and take next_token_logprobs"
            )
        self.loss_fn = loss_fn
        self.cu_seqlens_q, self.cu_seqlens_q_padded = cu_seqlens_q, cu_seqlens_q_padded
        self.loss_type, self.input_type = loss_fn.loss_type, loss_fn.input_type
        self.rows_per_unit = getattr(loss_fn, "rows_per_unit", 1)

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        return getattr(self.loss_fn, "metric_reductions", {})

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
        **inputs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        self._check_that_all_that_counts_is_packed(TokenMask.of(data, self.loss_fn).including_first)
        packing = {"cu_seqlens": self.cu_seqlens_q, "cu_seqlens_padded": self.cu_seqlens_q_padded}
        if isinstance(self.loss_fn, Loss):
            return self.loss_fn(
                next_token_logits, data, global_valid_seqs, global_valid_toks, vocab_parallel_rank,
                vocab_parallel_group, context_parallel_group, valid_vocab_size=valid_vocab_size, **packing, **inputs,
            )  # fmt: skip
        sharding = Sharding(vocab_parallel_group, context_parallel_group, valid_vocab_size, **packing)
        logprobs = next_token_stats(next_token_logits, data["input_ids"], sharding).logprobs
        counts = {"global_valid_seqs": global_valid_seqs, "global_valid_toks": global_valid_toks}
        return self.loss_fn(data=data, **counts, next_token_logprobs=logprobs, **inputs)

    def _check_that_all_that_counts_is_packed(self, mask: Tensor) -> None:
        lengths = self.cu_seqlens_q.diff().to(mask.device)
        if lengths.shape != mask.shape[:1]:
            return  # the loss says which shapes do not fit
        lost = (mask != 0) & (torch.arange(mask.shape[1], device=mask.device) >= lengths[:, None])
        check(
            ~lost.any(),
            lambda: (
                f"token_mask counts token {lost.nonzero()[0].tolist()}, but cu_seqlens_q gives the rows "
                f"{lengths.tolist()} tokens"
            ),
        )

"""Make the input of this rank's model chunks from a microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_megatron.batching.microbatch import Microbatch, padded_lengths
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.logprobs import Sharding
from rl_megatron.model.backend import packing_params
from rl_megatron.model.build import unwrap
from rl_megatron.topology.token_layout import TokenLayout
from rl_megatron.topology.topology import Topology


@dataclass(frozen=True)
class ModelInput:
    """The input of this rank's model chunks for one microbatch.

    Attributes:
        tokens: `[R, L]` token ids of this rank.
        packing: How sequences are packed; None if they are padded.
        sharding: How the model's output is distributed over ranks.
        padding: `[R, L]`, true for tokens that do not count in the balance of experts; None without experts.
    """

    tokens: Tensor
    packing: PackedSeqParams | None
    sharding: Sharding
    padding: Tensor | None

    @classmethod
    def build(
        cls, microbatch: Microbatch, topology: Topology, vocab_size: int, backend: str, balances_experts: bool
    ) -> ModelInput:
        """Build this rank's input from a microbatch."""
        batch, groups = microbatch.batch, topology.groups
        ids = batch["input_ids"]
        local_length = microbatch.shape(topology)[1] // topology.context
        if microbatch.lengths is None:
            packing, sharding = None, Sharding(groups.tp, groups.cp, vocab_size)
            layout = TokenLayout.padded(tuple(ids.shape), local_length, groups.cp, ids.device)
        else:
            padded = padded_lengths(microbatch.lengths, topology)
            starts, padded_starts = (
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (microbatch.lengths, padded)
            )
            packing = packing_params(padded, topology, backend)
            sharding = Sharding(groups.tp, groups.cp, vocab_size, starts, padded_starts)
            layout = TokenLayout.packed(
                starts.to(ids.device), padded_starts.to(ids.device), ids.size(1), local_length, groups.cp
            )
        padding = ~layout.scatter(_weighted_tokens(batch), False) if balances_experts else None
        return cls(layout.scatter(ids, 0), packing, sharding, padding)

    def padding_of(self, model_chunk: torch.nn.Module, topology: Topology) -> Tensor | None:
        """Return `padding` as megatron-core expects it for this model chunk.

        Under sequence parallelism, the model chunk with the embedding takes the whole mask and splits it itself; other
        model chunks get this rank's part.
        """
        if self.padding is not None and topology.sequence and not unwrap(model_chunk).pre_process:
            return self.padding.chunk(topology.tensor, dim=1)[topology.tensor_rank]
        return self.padding


def _weighted_tokens(batch: BatchedDataDict) -> Tensor:
    """Return `[b, S]`, true for every token within its sequence, for sequences with a loss weight above 0."""
    ids = batch["input_ids"]
    weighted = (batch["sample_mask"] > 0)[:, None].expand(ids.shape)
    if "input_lengths" not in batch:
        return weighted
    return weighted & (torch.arange(ids.size(1), device=ids.device) < batch["input_lengths"].to(ids.device)[:, None])

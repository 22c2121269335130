"""Make the input of this rank's model chunks from the microbatches of a step, on the host and before the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad

from rl_megatron.batching.microbatch import Microbatch, padded_lengths
from rl_megatron.batching.routing import ROUTED_EXPERTS, UNKNOWN_EXPERT
from rl_megatron.data.batch import BatchedDataDict
from rl_megatron.logprobs import Sharding
from rl_megatron.model.backend import build_packing_params
from rl_megatron.model.build import unwrap
from rl_megatron.model.layers.router_replay import number_tokens
from rl_megatron.topology.token_layout import TokenLayout
from rl_megatron.topology.topology import Topology


@dataclass(frozen=True)
class ModelInput:
    """The input of this rank's model chunks for one microbatch.

    Attributes:
        tokens: `[R, L]` token ids of this rank.
        packing: How sequences are packed; None if they are padded.
        sharding: How the model's output is distributed over ranks.
        padding: `[R, L]`, true for tokens that do not count in the balance of experts, or None if no router needs it.
            If routers look up recorded experts or counts, it encodes the tokens' numbers, too (`number_tokens`).
        experts: `[R, L, layers, k]`, the recorded experts in the layers of this rank; None if none are replayed.
        counts: `[R, L]`, in how many sequences with a loss weight a token is; None if sequences share no tokens, or no
            router needs it.
    """

    tokens: Tensor
    packing: PackedSeqParams | None
    sharding: Sharding
    padding: Tensor | None
    experts: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def build(
        cls,
        microbatch: Microbatch,
        topology: Topology,
        vocab_size: int,
        backend: str,
        counts_experts: bool,
        replayed_layers: Sequence[int] = (),
    ) -> ModelInput:
        """Build this rank's input from a microbatch. Its tensors are on the host, like those of the microbatch.

        With `counts_experts`, routers must know which tokens are padding. `replayed_layers` are the layers of this
        rank, counted from 0, that replay the batch's `routed_experts`.
        """
        batch, groups = microbatch.batch, topology.groups
        ids = batch["input_ids"]
        local_length = microbatch.shape(topology)[1] // topology.context
        packing, boundaries, tree = None, (None, None), microbatch.tree
        if tree is not None:
            segments = [(segment.begin, segment.length) for segment in tree.segments]
            padded = padded_lengths([length for _, length in segments], topology)
            packing = build_packing_params(padded, topology, backend, tree)
            layout = TokenLayout.from_segments(segments, tree.paths, padded, ids.size(1), groups.cp)
        elif microbatch.lengths is None:
            layout = TokenLayout.from_padded_batch((ids.size(0), ids.size(1)), local_length, groups.cp, ids.device)
        else:
            padded = padded_lengths(microbatch.lengths, topology)
            starts, padded_starts = boundaries = tuple(
                torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (microbatch.lengths, padded)
            )
            packing = build_packing_params(padded, topology, backend)
            layout = TokenLayout.from_pack(starts, padded_starts, ids.size(1), local_length, groups.cp)
        counted = _find_counted(batch)
        sharding = Sharding(
            groups.tp, groups.cp, vocab_size, *boundaries,
            most_counted=_most_counted(counted, layout, topology.tensor if topology.sequence else 1),
        )  # fmt: skip
        if layout.is_shared:
            sharing = layout.index[counted & (layout.index >= 0)].bincount()
            sharding = replace(
                sharding, shared_index=layout.index, most_sharing=int(sharing.max()) if len(sharing) else 1
            )
        experts, padding, counts = None, None, None
        if replayed_layers:
            experts = layout.scatter(batch[ROUTED_EXPERTS][:, :, list(replayed_layers)], UNKNOWN_EXPERT)
        if counts_experts or replayed_layers:
            padding = ~layout.scatter(_weighted_tokens(batch), False)
            counts = layout.count(_weighted_tokens(batch)) if layout.is_shared else None
        return cls(layout.scatter(ids, 0), packing, sharding, padding, experts, counts)

    def select_padding(self, model_chunk: torch.nn.Module, topology: Topology) -> Tensor | None:
        """Return `padding` as megatron-core expects it for this model chunk.

        Under sequence parallelism, the model chunk with the embedding needs the whole mask and splits it itself; other
        model chunks need this rank's part.
        """
        if self.padding is not None and topology.sequence and not unwrap(model_chunk).pre_process:
            return self.padding.chunk(topology.tensor, dim=1)[topology.tensor_rank]
        return self.padding


@dataclass(frozen=True)
class PreparedStep:
    """Everything that a pass over microbatches needs, so that one transfer can send it to the device.

    Attributes:
        experts: [N, layers, k] The recorded experts of this rank's tokens, by token number; None if none are replayed.
        counts: [N] `ModelInput.counts` by token number; None if no router needs it.
        shapes: (number of sequences, padded length over all ranks) of each microbatch.
    """

    microbatches: list[Microbatch]
    model_input: list[ModelInput]
    experts: Tensor | None
    counts: Tensor | None
    shapes: list[tuple[int, int]]


def number_all_tokens(
    unnumbered: Sequence[ModelInput],
) -> tuple[list[ModelInput], Tensor | None, Tensor | None]:
    """Return the inputs with their tokens numbered, and `PreparedStep.experts` and `counts`.

    If no router looks up recorded experts or counts, return the inputs unchanged.
    """
    experts = [model_input.experts.flatten(0, 1) for model_input in unnumbered if model_input.experts is not None]
    counts = [model_input.counts.flatten() for model_input in unnumbered if model_input.counts is not None]
    if not experts and not counts:
        return list(unnumbered), None, None
    numbered, first = [], 0
    for model_input in unnumbered:
        assert model_input.padding is not None, "routers that look something up know the padding"
        padding = number_tokens(model_input.padding, first)
        numbered.append(replace(model_input, padding=padding, experts=None, counts=None))
        first += model_input.padding.numel()
    return numbered, torch.cat(experts) if experts else None, torch.cat(counts) if counts else None


def _find_counted(batch: BatchedDataDict) -> Tensor:
    """Return `[b, S]`, true for the positions at which a token is evaluated: those before unmasked tokens.

    Without `token_mask`, all tokens are evaluated.
    """
    ids = batch["input_ids"]
    mask = batch["token_mask"] * batch["sample_mask"][:, None] if "token_mask" in batch else torch.ones_like(ids)
    return pad(mask[:, 1:] != 0, (0, 1))


def _most_counted(counted: Tensor, layout: TokenLayout, shards: int) -> int:
    """Return the number of evaluated tokens on the sequence-parallel rank that has the most of them."""
    by_rank = layout.scatter(counted, False).transpose(0, 1).reshape(shards, -1)  # hidden states are [L, R, hidden]
    return int(by_rank.sum(dim=1).max())


def _weighted_tokens(batch: BatchedDataDict) -> Tensor:
    """Return `[b, S]`, true for tokens that are not padding, in sequences with a loss weight above 0."""
    ids = batch["input_ids"]
    weighted = (batch["sample_mask"] > 0)[:, None].expand(ids.shape)
    if "input_lengths" not in batch:
        return weighted
    return weighted & (torch.arange(ids.size(1)) < batch["input_lengths"][:, None])

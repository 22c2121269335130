"""Causal attention on torch's scaled_dot_product_attention: for the CPU, and for GPUs without Transformer Engine."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_megatron.topology.context_parallel import zigzag_gather_and_reduce, zigzag_positions


class PortableAttention(torch.nn.Module):
    """softmax(QKᵀ·scale + causal mask)·V per head; grouped queries; no parameters.

    Under context parallelism the queries stay on their rank and keys and values are gathered over the group, in
    zigzag order, with a reduce-scatter in backward.

    Shapes (sequence S, batch B, heads N, key/value heads G, head dim D): query [S, B, N, D]; key, value [S, B, G, D];
    result [S, B, N·D].
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,  # later megatron-core versions pass more; this attention needs none of it
    ):
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"PortableAttention is causal; got attn_mask_type={attn_mask_type}")
        self.softmax_scale = softmax_scale
        self.cp_group = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: object | None = None,
        **_: object,
    ) -> Tensor:
        if packed_seq_params is not None:
            raise ValueError("PortableAttention takes padded rows, not packed sequences")
        mask = None
        if self.cp_group is not None and self.cp_group.size() > 1:
            key = zigzag_gather_and_reduce(key, self.cp_group, dim=0)
            value = zigzag_gather_and_reduce(value, self.cp_group, dim=0)
            positions = zigzag_positions(key.size(0), self.cp_group.rank(), self.cp_group.size(), query.device)
            mask = torch.arange(key.size(0), device=query.device) <= positions[:, None]
        return attend(query, key, value, mask, self.softmax_scale)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Scaled dot-product attention in megatron-core's [S, B, heads, D] layout, causal unless a mask is given.

    `mask`: boolean, broadcastable to [B, N, S_q, S_k], true where a query may look.
    """
    output = scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.size(2) != key.size(2),
    )
    return output.permute(2, 0, 1, 3).flatten(2)

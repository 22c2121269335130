"""Causal attention on torch's scaled_dot_product_attention, for the CPU and for GPUs without Transformer Engine.

It supports padded batches and packs, context parallelism, grouped queries and sliding windows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_megatron.model.layers.packed import PackedSequences, causal_mask
from rl_megatron.topology.context_parallel import gather_and_reduce, zigzag_gather_and_reduce, zigzag_positions


@dataclass
class PortablePacking(PackedSeqParams):
    """The sequences of a pack, for `PortableRotaryEmbedding` and `PortableAttention`.

    megatron-core passes it through the layers. For the modules in between, a pack is a batch of one long sequence.
    """

    sequences: PackedSequences = field(kw_only=True)
    qkv_format: str = field(default="sbhd", init=False)


class PortableRotaryEmbedding(RotaryEmbedding):
    """megatron-core's RoPE, in which each token of a pack has its position in its own sequence.

    One lookup gives the angles of the whole pack; megatron-core would loop over sequences in every layer.

    If layers with a window have their own frequencies (`local_frequencies` [D/2]), the angles of both kinds are side by
    side, [S, 2, 1, D], because megatron-core passes one tensor to all layers. `PortableSelfAttention` selects its own.
    """

    local_frequencies: Tensor | None = None

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles of `max_seq_len` positions from `offset` on.

        The shape is [S, 1, 1, D], or [S, 2, 1, D] if layers with a window have their own frequencies.
        """
        angles = super().get_emb(max_seq_len, offset)
        if self.local_frequencies is None:
            return angles
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=self.local_frequencies.device) + offset
        local = torch.outer(positions, self.local_frequencies).repeat(1, 2)
        return torch.cat([angles, local[:, None, None]], dim=1)

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> int | PackedSequences:
        """Return the argument for `forward`: the sequences of a pack, or the sequence length of a padded batch."""
        if isinstance(packed_seq_params, PortablePacking):
            return packed_seq_params.sequences
        return super().get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params
        )

    def forward(self, max_seq_len: int | PackedSequences, *args: Any, **kwargs: Any) -> Tensor:
        """Return the angles of this rank's tokens, given the sequences of a pack or the length of a padded batch."""
        if isinstance(max_seq_len, PackedSequences):
            return self.get_emb(max_seq_len.longest)[max_seq_len.positions]
        return super().forward(max_seq_len, *args, **kwargs)


class PortableSelfAttention(SelfAttention):
    """megatron-core's self-attention, which selects the layer's RoPE if layers with a window have their own."""

    def forward(self, *args: Any, rotary_pos_emb: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return megatron-core's result with the RoPE angles of this layer."""
        if rotary_pos_emb is not None and rotary_pos_emb.size(1) == 2:
            own = 0 if sliding_window(self.config, self.layer_number) is None else 1
            rotary_pos_emb = rotary_pos_emb[:, own : own + 1]
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class PortableAttention(torch.nn.Module):
    """The attention softmax(QKᵀ·scale + mask)·V per head, with grouped queries and without parameters.

    Each token attends to itself and to the `sliding_window − 1` tokens before it, or to all tokens before it if there
    is no window. Under context parallelism the queries stay on their rank. Keys and values are gathered over the group
    in one all-gather, whose backward is a reduce-scatter.

    Shapes (positions S of the rank, batch B, heads N, key/value heads G, head dim D): query is [S, B, N, D]; key and
    value are [S, B, G, D]; the result is [S, B, N·D]. A pack has B = 1.
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
        **_: object,  # later versions of megatron-core pass more arguments, which are not needed here
    ):
        super().__init__()
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"PortableAttention is causal; got attn_mask_type={attn_mask_type}")
        self.softmax_scale = softmax_scale
        self.window = sliding_window(config, layer_number)
        self.cp_group = pg_collection.cp if pg_collection is not None else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> Tensor:
        """Return the attention's output [S, B, N·D] for a padded batch or, if `packed_seq_params` is given, for a pack.

        Raises:
            TypeError: `packed_seq_params` is not a `PortablePacking`.
        """
        if packed_seq_params is None:
            return self._padded(query, key, value)
        if not isinstance(packed_seq_params, PortablePacking):
            raise TypeError(f"PortableAttention needs a PortablePacking, got {type(packed_seq_params).__name__}")
        return self._packed(query, key, value, packed_seq_params.sequences)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        whole = zigzag_gather_and_reduce(torch.cat([key, value], dim=-1), self.cp_group, dim=0)
        key, value = whole.split([key.size(-1), value.size(-1)], dim=-1)
        mask, length, device = None, key.size(0), query.device
        if self.cp_group is not None and self.cp_group.size() > 1:
            mask = _zigzag_mask(length, self.cp_group.rank(), self.cp_group.size(), self.window, device)
        elif self.window is not None and self.window < length:
            mask = causal_mask(torch.arange(length, device=device), length, self.window)
        return attend(query, key, value, mask, self.softmax_scale)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        """Return the output for a pack. Sequences of similar length are unpacked into one batch and attend together.

        So no scores are computed between tokens of different sequences.
        """
        whole = gather_and_reduce(torch.cat([key, value], dim=-1)[:, 0], self.cp_group)
        outputs = []
        for bucket in sequences.buckets:
            key, value = (
                whole.index_select(0, bucket.keys)
                .view(*bucket.key_shape, *whole.shape[1:])
                .transpose(0, 1)
                .split([key.size(-1), value.size(-1)], dim=-1)
            )
            queries = query[:, 0].index_select(0, bucket.queries).view(*bucket.query_shape, *query.shape[2:])
            mask = bucket.mask(self.window)
            outputs.append(attend(queries.transpose(0, 1), key, value, mask, self.softmax_scale).transpose(0, 1))
        return torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, sequences.slots)[:, None]


def sliding_window(config: TransformerConfig, layer_number: int) -> int | None:
    """Return the number of tokens that a token attends to in a layer, itself included, or None for all before it.

    Args:
        config: megatron-core's config. Its `window_size` counts the tokens on each side, without the token itself.
        layer_number: The number of the layer, from 1 on.
    """
    window, skips = config.window_size, config.window_attn_skip_freq
    if window is None:
        return None
    # The function accepts None, which its annotation omits.
    has_window = is_layer_window_attention(window, skips, layer_number)  # pyright: ignore[reportArgumentType]
    return window[0] + 1 if has_window else None


@lru_cache(maxsize=4)
def _zigzag_mask(length: int, cp_rank: int, cp_size: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask of a rank's zigzag slices. It is cached, because layers and most microbatches share it."""
    return causal_mask(zigzag_positions(length, cp_rank, cp_size, device), length, window)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return scaled dot-product attention [S_q, B, N·D] of tensors in megatron-core's layout.

    Args:
        query: [S_q, B, N, D].
        key: [S_k, B, G, D].
        value: [S_k, B, G, D].
        mask: Boolean, broadcastable to [B, N, S_q, S_k], and true if a query may attend to a key. None means causal
            attention.
        scale: The factor of the scores. None means 1/√D.
    """
    if mask is not None and key.size(2) != query.size(2):
        # On a GPU, only the kernel that stores all scores supports a mask together with grouped queries.
        key, value = (x.repeat_interleave(query.size(2) // x.size(2), dim=2) for x in (key, value))
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

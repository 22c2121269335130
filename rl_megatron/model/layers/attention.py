"""Causal attention on torch's scaled_dot_product_attention, for the CPU and for GPUs without Transformer Engine.

It supports padded batches and packs, context parallelism, grouped queries, sliding windows and sinks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_megatron.model.layers.attention_kernels import (
    attend_by_cudnn,
    attend_last,
    attend_within_pack,
    flash_attends_last,
)
from rl_megatron.model.layers.packed import LastBiases, PackedSequences, build_causal_bias
from rl_megatron.model.layers.packed_tree import PackedTree
from rl_megatron.model.layers.rope import compute_turns, rotate, split_and_rotate
from rl_megatron.model.layers.sinks import attend_with_sinks
from rl_megatron.model.layers.tree_attention import attend_in_tree, attend_in_tree_by_flash
from rl_megatron.topology.context_parallel import gather_and_reduce, zigzag_gather_and_reduce, zigzag_positions

if TYPE_CHECKING:
    from megatron.core.inference.contexts import BaseInferenceContext
    from megatron.core.transformer.transformer_block import TransformerBlock

BIASES = LastBiases()
"""The attention biases of the current microbatch, which all layers share. `Runner` clears them after a pass."""


@dataclass
class PortablePacking(PackedSeqParams):
    """The sequences of a pack, for `PortableRotaryEmbedding` and `PortableAttention`.

    megatron-core passes it through the layers. For the modules in between, a pack is a batch of one long sequence.
    """

    sequences: PackedSequences = field(kw_only=True)
    qkv_format: str = field(default="sbhd", init=False)


class PortableRotaryEmbedding(RotaryEmbedding):
    """megatron-core's RoPE, in which each token of a pack has its position in its own sequence.

    It returns cosines and sines (`compute_turns`) instead of angles. They are computed once for all layers. A pack's
    cosines and sines need only one lookup; megatron-core would loop over sequences in every layer.

    If layers with a window have their own frequencies (`local_frequencies` [D/2]), it returns both kinds side by side,
    [S, 1, 2, D], because megatron-core passes one tensor to all layers. `PortableSelfAttention` selects one kind.
    """

    local_frequencies: Tensor | None = None
    scale: float = 1.0  # a factor of cosines and sines

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the cosines and sines of `max_seq_len` positions, from `offset` on.

        The shape is [S, 1, 1, D], or [S, 1, 2, D] if layers with a window have their own frequencies.
        """
        angles = [self.get_freqs_non_repeated(max_seq_len, offset)]
        if self.local_frequencies is not None:
            positions = torch.arange(max_seq_len, dtype=torch.float32, device=self.local_frequencies.device) + offset
            angles.append(torch.outer(positions, self.local_frequencies))
        turns = compute_turns(torch.stack(angles, dim=1))[:, None]
        return turns if self.scale == 1.0 else turns * self.scale

    def get_rotary_seq_len(
        self,
        inference_context: BaseInferenceContext,
        transformer: TransformerBlock,
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
        """Return this rank's cosines and sines, given the sequences of a pack or the length of a padded batch."""
        if isinstance(max_seq_len, PackedSequences):
            return self.get_emb(max_seq_len.longest)[max_seq_len.positions]
        return super().forward(max_seq_len, *args, **kwargs)


class PortableSelfAttention(SelfAttention):
    """megatron-core's self-attention with the rotation of queries and keys from `rope.py`.

    If layers with a window have their own RoPE, it selects the layer's. With `attention_output_gate`, the rows of
    `linear_qkv` have each head's gate directly after the head's query, as in Hugging Face checkpoints; megatron-core
    would put the gates after all queries of a group.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,  # megatron-core's inference, which is not used
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention's output [S, B, H] and its bias, which is None.

        `attention_mask` is not used, because `PortableAttention` is causal. `rotary_pos_emb` is what
        `PortableRotaryEmbedding` returns.
        """
        if rotary_pos_emb.size(2) == 2:
            kind = 0 if get_sliding_window(self.config, self.layer_number) is None else 1
            rotary_pos_emb = rotary_pos_emb[:, :, kind : kind + 1]
        gate = None
        if self.config.attention_output_gate:
            query, key, value, gate = self._project_gated(hidden_states, rotary_pos_emb)
        else:
            query, key, value = self._project(hidden_states, rotary_pos_emb)
        if self.checkpoint_core_attention and self.training:
            attended = self._checkpointed_attention_forward(
                query, key, value, attention_mask, packed_seq_params=packed_seq_params
            )
        else:
            core: Any = self.core_attention
            attended = core(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        if gate is not None:
            attended = (attended * gate.flatten(2).float().sigmoid()).type_as(attended)
        return self.linear_proj(attended)

    def _project_gated(self, hidden: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the rotated query and key, the value, and the gate [S, B, N, D] of each query head."""
        project: Any = self.linear_qkv
        mixed, _ = project(hidden)
        size, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = mixed.unflatten(-1, (groups, -1, size))
        queries, key, value = heads.split([heads.size(-2) - 2, 1, 1], dim=-2)
        query, gate = (x.flatten(2, 3) for x in queries.unflatten(-2, (-1, 2)).unbind(-2))
        key, value = key.squeeze(-2), value.squeeze(-2)
        norms: Any = self.q_layernorm, self.k_layernorm
        turned = [
            rotate(norm(x), turns, interleaved=self.config.rotary_interleaved)
            for norm, x in zip(norms, (query, key), strict=True)
        ]
        return turned[0], turned[1], value.contiguous(), gate

    def _project(self, hidden: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rotated query and key, and the value."""
        make: Any = self.get_query_key_value_tensors  # its annotation is a union of return types
        groups, has_norms = self.config.num_query_groups, self.config.qk_layernorm
        interleaved = self.config.rotary_interleaved
        assert groups is not None, "TransformerConfig fills it in"
        if has_norms or groups < self.world_size:  # ranks that share a group split its queries
            query, key, value = make(hidden)
            return rotate(query, turns, interleaved=interleaved), rotate(key, turns, interleaved=interleaved), value
        mixed, _ = make(hidden, split_qkv=False)
        return split_and_rotate(mixed, turns, self.hidden_size_per_attention_head, interleaved=interleaved)


class PortableAttention(torch.nn.Module):
    """The attention softmax(QKᵀ·scale + mask)·V per head, with grouped queries.

    Each token attends to itself and to the `sliding_window − 1` tokens before it, or to all tokens before it if there
    is no window. Under context parallelism the queries stay on their rank. Keys and values are gathered over the group
    in one all-gather, whose backward is a reduce-scatter. A rank's two slices of a sequence then attend one after the
    other, each to the keys up to its end, so that causal kernels need no mask.

    If the config's `softmax_type` is "learnable", it has one parameter: `softmax_offset`, megatron-core's name for the
    sinks of the rank's heads (`sinks.py`).

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
        self.window = get_sliding_window(config, layer_number)
        self.by_cudnn = getattr(config, "cudnn_attention", False)
        self.cp_group = pg_collection.cp if pg_collection is not None else None
        self.tp_group = pg_collection.tp if pg_collection is not None else None
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(
                torch.empty(heads, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, object]:
        """Return where this rank's sinks, which tensor parallelism splits, are in the whole model."""
        if self.softmax_offset is None:
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=(metadata or {})["dp_cp_group"],
        )  # fmt: skip

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
        """Return the output [S, B, N·D] for a padded batch or, if `packed_seq_params` is given, for a pack."""
        if packed_seq_params is None:
            return self._attend_padded(query, key, value)
        if not isinstance(packed_seq_params, PortablePacking):
            raise TypeError(f"PortableAttention needs a PortablePacking, got {type(packed_seq_params).__name__}")
        return self._attend_packed(query, key, value, packed_seq_params.sequences)

    def _attend_padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.cp_group is not None and self.cp_group.size() > 1:
            whole = zigzag_gather_and_reduce(torch.cat([key, value], dim=-1), self.cp_group, dim=0)
            key, value = whole.split([key.size(-1), value.size(-1)], dim=-1)
        length = key.size(0)
        cp_rank, cp_size = (0, 1) if self.cp_group is None else (self.cp_group.rank(), self.cp_group.size())
        sequences = (length, cp_rank, cp_size, query.device)
        if not self._has_window(length):
            return self._attend_to_all(query, key, value, sequences)

        def make() -> Tensor:
            if cp_size == 1:
                positions = torch.arange(length, device=query.device)
            else:
                positions = zigzag_positions(length, cp_rank, cp_size, query.device)
            return build_causal_bias(positions, length, self.window, query.dtype)

        bias = BIASES.get(sequences, (self.window, query.dtype), make)
        return self._attend(query, key, value, bias)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        return attend(query, key, value, bias, self.softmax_scale, self.softmax_offset)

    def _has_window(self, length: int) -> bool:
        return self.window is not None and self.window < length

    def _attend_to_all(self, query: Tensor, key: Tensor, value: Tensor, sequences: object) -> Tensor:
        """Return the attention, without a window, of this rank's queries [S/cp, …] to all keys and values [S, …].

        Args:
            query: This rank's queries of sequences that are split zigzag over ranks.
            key: The keys of the whole sequences.
            value: The values of the whole sequences.
            sequences: An object that identifies the sequences for `LastBiases`.
        """
        if len(query) == len(key) or self.cp_group is None:
            return self._attend_last(query, key, value, sequences)
        rank, cp_size, slice_length = self.cp_group.rank(), self.cp_group.size(), len(query) // 2
        ends = (slice_length * (rank + 1), slice_length * (2 * cp_size - rank))
        outputs = [
            self._attend_last(queries, key[:end], value[:end], sequences)
            for queries, end in zip(query.chunk(2), ends, strict=True)
        ]
        return torch.cat(outputs)

    def _attend_last(self, query: Tensor, key: Tensor, value: Tensor, sequences: object) -> Tensor:
        """Return the attention, without a window, of queries at the last `len(query)` of the keys' positions."""
        num_queries, length = len(query), len(key)
        flash = self.softmax_offset is None and flash_attends_last(query, value)
        if num_queries == length and flash and self.by_cudnn:
            return attend_by_cudnn(query, key, value, self.softmax_scale)
        if num_queries == length or flash:
            return self._attend(query, key, value, None)
        positions = torch.arange(length - num_queries, length, device=query.device)
        make = partial(build_causal_bias, positions, length, None, query.dtype)
        bias = BIASES.get(sequences, (num_queries, length, query.dtype), make)
        return self._attend(query, key, value, bias)

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences) -> Tensor:
        """Return the output for a pack. No scores are computed between tokens of different sequences.

        torch's flash kernel computes a pack directly. For other kernels, sequences of similar length are unpacked into
        one batch.
        """
        if isinstance(sequences, PackedTree):
            return self._attend_in_tree(query[:, 0], key[:, 0], value[:, 0], sequences)[:, None]
        if self.attends_within_pack(query, value, sequences):
            parts = (query[:, 0], key[:, 0], value[:, 0])
            return attend_within_pack(*parts, sequences.starts, sequences.longest, self.softmax_scale)[:, None]
        if self.cp_group is None or self.cp_group.size() == 1:
            batches = zip(*(sequences.unpack(x[:, 0]) for x in (query, key, value)), strict=True)
        else:
            batches = self._gather_batches(query, key, value, sequences)
        outputs = []
        for bucket, batch in zip(sequences.buckets, batches, strict=True):
            queries, keys, values = (x.transpose(0, 1) for x in batch)
            length = bucket.key_shape[1]
            if not self._has_window(length) and (bucket.is_even or bucket.query_shape == bucket.key_shape):
                output = self._attend_to_all(queries, keys, values, sequences)
            else:
                make = partial(build_causal_bias, bucket.positions[:, None], length, self.window, query.dtype)
                bias = BIASES.get(sequences, (bucket.key_shape, self.window, query.dtype), make)
                output = self._attend(queries, keys, values, bias)
            outputs.append(output.transpose(0, 1).flatten(0, 1))
        return sequences.pack(outputs)[:, None]

    def _attend_in_tree(self, query: Tensor, key: Tensor, value: Tensor, tree: PackedTree) -> Tensor:
        """Return the output [S, N·Dv] for this rank's tokens of a tree, given tensors [S, heads, size]."""
        if tree.order is not None:
            whole = gather_and_reduce(torch.cat([key, value], dim=-1), self.cp_group).index_select(0, tree.order)
            key, value = whole.split([key.size(-1), value.size(-1)], dim=-1)
        window = self.window if self._has_window(tree.longest) else None
        if window is None and flash_attends_last(query, value):
            return attend_in_tree_by_flash(query, key, value, tree.flash_calls, self.softmax_scale, self.softmax_offset)
        own_biases: list[Tensor | None] = []
        for bucket in tree.buckets:
            length = bucket.key_shape[1]
            if tree.cp_size == 1 and (window is None or window >= length):
                own_biases.append(None)
                continue
            make = partial(build_causal_bias, bucket.positions[:, None], length, window, query.dtype)
            own_biases.append(BIASES.get(tree, (bucket.key_shape, window, query.dtype), make))
        if window is None:
            parts = [(part, None) for part in tree.list_ancestors()]
        else:
            parts = [
                (part, BIASES.get(tree, (number, window), partial(part.build_bias, window, query.dtype, query.device)))
                for number, part in enumerate(tree.list_ancestors_in_window(window))
            ]
        return attend_in_tree(query, key, value, tree, own_biases, parts, self.softmax_scale, self.softmax_offset)

    def attends_within_pack(self, query: Tensor, value: Tensor, sequences: PackedSequences) -> bool:
        """Return whether the flash kernel computes the pack as it is, without dividing it into batches."""
        return (
            (self.cp_group is None or self.cp_group.size() == 1)
            and self.softmax_offset is None
            and not (self.by_cudnn or sequences.is_one_batch or self._has_window(sequences.longest))
            and flash_attends_last(query, value)
        )

    def _gather_batches(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each bucket's queries [b, L/cp, N, D] of this rank, and all ranks' keys and values [b, L, G, D]."""
        whole = gather_and_reduce(torch.cat([key, value], dim=-1)[:, 0], self.cp_group)
        for bucket in sequences.buckets:
            queries = query[:, 0].index_select(0, bucket.queries).unflatten(0, bucket.query_shape)
            both = whole.index_select(0, bucket.keys).unflatten(0, bucket.key_shape)
            keys, values = both.split([key.size(-1), value.size(-1)], dim=-1)
            yield queries, keys, values


def get_sliding_window(config: TransformerConfig, layer_number: int) -> int | None:
    """Return the number of tokens that a token attends to in a layer, itself included, or None for no window.

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


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None, sinks: Tensor | None = None
) -> Tensor:
    """Return scaled dot-product attention [S_q, B, N·D] of tensors in megatron-core's layout.

    Args:
        query: [S_q, B, N, D].
        key: [S_k, B, G, D].
        value: [S_k, B, G, D].
        bias: What to add to the scores, broadcastable to [B, N, S_q, S_k] and of the query's dtype
            (`build_causal_bias`). None means causal attention with as many queries as keys. If `flash_attends_last` is
            true, there may be fewer queries; they are at the last positions.
        scale: The factor of the scores. None means 1/√D.
        sinks: [N], the score of each head's sink, or None.
    """
    if bias is None and sinks is None and flash_attends_last(query, value):
        return attend_last(query, key, value, scale)
    if key.size(2) != query.size(2) and (sinks is not None or lacks_grouped_kernel(query, bias)):
        key, value = (x.repeat_interleave(query.size(2) // x.size(2), dim=2) for x in (key, value))
    if sinks is not None:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return attend_with_sinks(query, key, value, sinks, bias, scale).permute(2, 0, 1, 3).flatten(2)
    output = scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.permute(1, 2, 0, 3),
        value.permute(1, 2, 0, 3),
        attn_mask=bias,
        is_causal=bias is None,
        scale=scale,
        enable_gqa=query.size(2) != key.size(2),
    )
    return output.permute(2, 0, 1, 3).flatten(2)


def lacks_grouped_kernel(query: Tensor, bias: Tensor | None) -> bool:
    """Return whether grouped queries are supported only by the kernel that stores all scores.

    On a GPU, the flash kernel supports grouped queries, but neither a bias nor fp32.
    """
    return query.is_cuda and (bias is not None or query.dtype is torch.float32)

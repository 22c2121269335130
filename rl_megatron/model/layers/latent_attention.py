"""Multi-head latent attention (DeepSeek-V2 and -V3): a token's keys and values are computed from one small latent."""

from __future__ import annotations

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import LatentShape
from rl_megatron.model.layers.attention import PortableAttention
from rl_megatron.model.layers.norms import PortableRMSNorm
from rl_megatron.model.layers.rope import compute_rotary_scale, rotate

LATENT_NORM_EPSILON = 1e-6  # DeepSeek's models use this ε for latents, whatever ε their other norms have


class ReplicatedLinear(torch.nn.Linear):
    """The product x·Wᵀ with the whole W on every tensor-parallel rank.

    Under sequence parallelism each rank computes it for its own tokens, and the gradient of W is marked for the
    all-reduce. Otherwise each rank computes it for all tokens.
    """

    def __init__(self, config: TransformerConfig, in_features: int, out_features: int):
        super().__init__(
            in_features, out_features, bias=False, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        # megatron-core reads this mark from the parameter.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class LatentAttention(MegatronModule):
    """Multi-head latent attention, which replaces megatron-core's self-attention and uses megatron-core's linears.

    Its modules have the names of megatron-core's MLASelfAttention. That class is not used for three reasons. It refuses
    RoPE angles as an argument. It supports packs only with Transformer Engine. And all heads share a part of the key,
    whose gradient it does not sum over tensor-parallel ranks: each rank gets only the contribution of its own heads.

        c_q = norm(W_dq·h)          q = W_uq·c_q       [nope + rope] per head; without `q_lora_rank`, q = W_q·h
        c_kv, k_r = W_dkv·h         k, v = W_ukv·norm(c_kv)   [nope + v] per head
        scores = [q_nope, rope(q_rope)] · [k, rope(k_r)]

    RoPE rotates neighbours (x₀, x₁), (x₂, x₃), …. They are first sorted into halves, the order that `rotate` expects.

    Shapes: hidden is [S, B, H], or [S/tp, B, H] under sequence parallelism; the result has the same shape.

    Source: DeepSeek-AI 2024 (arXiv:2405.04434), §2.1.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        model: ModelConfig,
        pg_collection: ProcessGroupCollection,
        **_: object,  # arguments that megatron-core passes to every attention
    ):
        super().__init__(config)
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.shape, self.rotary_scale = LatentShape.from_model(model), compute_rotary_scale(model.rope_scaling)
        recomputed = config.recompute_modules or ()
        self.recomputes = config.recompute_granularity == "selective" and "core_attn" in recomputed
        hidden, heads, shape = model.hidden_size, model.num_attention_heads, self.shape
        if model.q_lora_rank is None:
            self.linear_q_proj = self._up(hidden, heads * shape.query)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, hidden, model.q_lora_rank)
            self.q_layernorm = PortableRMSNorm(config, model.q_lora_rank, eps=LATENT_NORM_EPSILON)
            self.linear_q_up_proj = self._up(model.q_lora_rank, heads * shape.query)
        self.linear_kv_down_proj = ReplicatedLinear(config, hidden, shape.latent + shape.rope)
        self.kv_layernorm = PortableRMSNorm(config, shape.latent, eps=LATENT_NORM_EPSILON)
        self.linear_kv_up_proj = self._up(shape.latent, heads * shape.key_and_value)
        self.core_attention = PortableAttention(
            config, layer_number, AttnMaskType.causal, "self", softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
        )  # fmt: skip
        assert config.output_layer_init_method is not None, "TransformerConfig fills it in"
        self.linear_proj = RowParallelLinear(
            heads * shape.value, hidden, config=config, init_method=config.output_layer_init_method, bias=False,
            input_is_parallel=True, skip_bias_add=True, is_expert=False, tp_group=self.tp_group,
        )  # fmt: skip

    def _up(self, in_features: int, out_features: int) -> ColumnParallelLinear:
        assert self.config.init_method is not None, "TransformerConfig fills it in"
        return ColumnParallelLinear(
            in_features, out_features, config=self.config, init_method=self.config.init_method, bias=False,
            gather_output=False, skip_bias_add=False, is_expert=False, tp_group=self.tp_group,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Return the attention's output [S, B, H] and its bias, which is None."""
        query = self._query(hidden_states, rotary_pos_emb)
        key, value = self._key_and_value(hidden_states, rotary_pos_emb)

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self.core_attention(query, key, value, packed_seq_params=packed_seq_params)

        if self.recomputes and self.training:
            return self.linear_proj(checkpoint(attend, False, query, key, value))
        return self.linear_proj(attend(query, key, value))

    def _query(self, hidden: Tensor, turns: Tensor) -> Tensor:
        if hasattr(self, "linear_q_proj"):
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden)))
        plain, turned = query.unflatten(-1, (-1, self.shape.query)).split([self.shape.nope, self.shape.rope], dim=-1)
        return torch.cat([plain, self._turn(turned, turns)], dim=-1)

    def _key_and_value(self, hidden: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        latent, shared = self.linear_kv_down_proj(hidden).split([self.shape.latent, self.shape.rope], dim=-1)
        if self.config.sequence_parallel:
            shared = gather_from_sequence_parallel_region(shared, group=self.tp_group)  # backward sums over all heads
        else:
            shared = copy_to_tensor_model_parallel_region(shared, group=self.tp_group)  # backward sums over all heads
        both, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        heads = both.unflatten(-1, (-1, self.shape.key_and_value))
        key, value = heads.split([self.shape.nope, self.shape.value], dim=-1)
        shared = self._turn(shared[:, :, None], turns).expand(*key.shape[:-1], self.shape.rope)
        return torch.cat([key, shared], dim=-1), value.contiguous()

    def _turn(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return x [S, B, heads, rope] rotated by RoPE."""
        sorted_ = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return rotate(sorted_, turns, self.rotary_scale)

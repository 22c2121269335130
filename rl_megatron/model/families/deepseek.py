"""DeepSeek-V3: latent attention, dense first layers, then experts chosen by groups, sigmoid scores and a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import LatentShape
from rl_megatron.model.families.biased_experts import add_dense_or_experts, is_dropped, read_experts, write_experts
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.rope import read_rope, write_rope
from rl_megatron.model.families.table import Layer, TableBuilder, WeightTable, build_decoder_table

# Keys that must have one of these values, because no other value is supported.
_ABSENT: dict[str, tuple] = {
    "attention_bias": (None, False),
    "rope_interleave": (None, True),
    "hidden_act": (None, "silu"),
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
    "moe_layer_freq": (None, 1),
    "quantization_config": (None,),  # the published checkpoint has fp8 weights and separate scales
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    for key, absent in _ABSENT.items():
        if hf.get(key) not in absent:
            raise ConfigError(f"{key}={hf[key]} is not supported; DeepSeek-V3 needs {key}={absent[-1]} here")
    return ModelConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_attention_heads"],
        max_sequence_length=hf["max_position_embeddings"],
        norm_epsilon=hf["rms_norm_eps"],
        tie_embeddings=hf.get("tie_word_embeddings", False),
        vocab_size=hf["vocab_size"],
        kv_lora_rank=hf["kv_lora_rank"],
        q_lora_rank=hf.get("q_lora_rank"),
        qk_nope_head_dim=hf["qk_nope_head_dim"],
        qk_rope_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        **read_rope(hf),
        **read_experts(hf),
    )


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": [DEEPSEEK_V3.architecture],
        "model_type": "deepseek_v3",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "max_position_embeddings": model.max_sequence_length,
        **write_rope(model),
        "rope_interleave": True,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "kv_lora_rank": model.kv_lora_rank,
        "q_lora_rank": model.q_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        **write_experts(model),
        "vocab_size": vocab_size,
    }


def build_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    return build_decoder_table(model, vocab_size, _add_latent_attention, add_dense_or_experts)


def _add_latent_attention(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    _, hf, megatron = layer
    hidden, heads, shape = model.hidden_size, model.num_attention_heads, LatentShape.from_model(model)
    table.add(f"{hf}input_layernorm.weight", f"{megatron}input_layernorm.weight", hidden)
    hf, megatron = f"{hf}self_attn.", f"{megatron}self_attention."
    queries = heads * shape.query
    if model.q_lora_rank is None:
        table.add(f"{hf}q_proj.weight", f"{megatron}linear_q_proj.weight", queries, hidden)
    else:
        rank = model.q_lora_rank
        table.add(f"{hf}q_a_proj.weight", f"{megatron}linear_q_down_proj.weight", rank, hidden)
        table.add(f"{hf}q_a_layernorm.weight", f"{megatron}linear_q_up_proj.layer_norm_weight", rank)
        table.add(f"{hf}q_b_proj.weight", f"{megatron}linear_q_up_proj.weight", queries, rank)
    down, up = shape.latent + shape.rope, heads * shape.key_and_value
    table.add(f"{hf}kv_a_proj_with_mqa.weight", f"{megatron}linear_kv_down_proj.weight", down, hidden)
    table.add(f"{hf}kv_a_layernorm.weight", f"{megatron}linear_kv_up_proj.layer_norm_weight", shape.latent)
    table.add(f"{hf}kv_b_proj.weight", f"{megatron}linear_kv_up_proj.weight", up, shape.latent)
    table.add(f"{hf}o_proj.weight", f"{megatron}linear_proj.weight", hidden, heads * shape.value)


# Keys about training or other software, and keys that repeat others.
_IGNORED = frozenset(
    {
        "aux_loss_alpha", "auto_map", "ep_size", "head_dim", "num_key_value_heads", "num_nextn_predict_layers",
        "qk_head_dim", "seq_aux",
    }
)  # fmt: skip
DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", read_config, write_config, build_table, is_dropped, _IGNORED)

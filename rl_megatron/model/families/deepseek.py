"""DeepSeek-V3: latent attention, dense first layers, then experts chosen group by group by sigmoid scores and a bias.

A checkpoint has further layers at the end, which predict more than one token ahead (`num_nextn_predict_layers`). They
are not part of the model here, nor of transformers' forward pass. `is_dropped` recognizes their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import LatentShape, num_experts
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.rope import read_rope, write_rope
from rl_megatron.model.families.table import TableBuilder, WeightTable, embeddings, gated_mlp

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
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the model section that a config.json describes.

    Raises:
        ConfigError: A key is missing or has a value that is not supported.
    """
    for key, absent in _ABSENT.items():
        if hf.get(key) not in absent:
            raise ConfigError(f"{key}={hf[key]} is not supported; DeepSeek-V3 needs {key}={absent[-1]} here")
    num_layers, dense = hf["num_hidden_layers"], hf["first_k_dense_replace"]
    return ModelConfig(
        num_layers=num_layers,
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
        **(_read_experts(hf) if dense < num_layers else {}),
    )


def _read_experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    groups, visited = hf["n_group"] or 1, hf["topk_group"] or 1
    return {
        "num_experts": hf["n_routed_experts"],
        "experts_per_token": hf["num_experts_per_tok"],
        "expert_ffn_hidden_size": hf["moe_intermediate_size"],
        "shared_expert_ffn_hidden_size": hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0) or None,
        "normalize_expert_weights": hf["norm_topk_prob"],
        "first_dense_layers": hf["first_k_dense_replace"],
        "router_score": "sigmoid",
        "router_bias": True,
        **({} if visited >= groups else {"router_groups": groups, "router_groups_per_token": visited}),
        "routed_scaling_factor": hf["routed_scaling_factor"],
    }


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the config.json of the model; `vocab_size` is the number of rows of its embedding."""
    ffn = model.expert_ffn_hidden_size or model.ffn_hidden_size
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
        "n_routed_experts": model.num_experts or 1,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": ffn,
        "n_shared_experts": (model.shared_expert_ffn_hidden_size or 0) // ffn,
        "norm_topk_prob": model.normalize_expert_weights,
        "first_k_dense_replace": model.num_layers if model.num_experts is None else model.first_dense_layers,
        "n_group": model.router_groups or 1,
        "topk_group": model.router_groups_per_token or 1,
        "routed_scaling_factor": model.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
        "vocab_size": vocab_size,
    }


def weight_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    """Return the weight table of the model; `vocab_size` is the number of rows of its embedding."""
    table, hidden = TableBuilder(), model.hidden_size
    for layer in range(model.num_layers):
        hf, megatron = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        table.same(f"{hf}input_layernorm.weight", f"{megatron}input_layernorm.weight", hidden)
        _latent_attention(table, model, f"{hf}self_attn.", f"{megatron}self_attention.")
        is_dense = model.num_experts is None or layer < model.first_dense_layers
        norm = "mlp.linear_fc1.layer_norm_weight" if is_dense else "pre_mlp_layernorm.weight"
        table.same(f"{hf}post_attention_layernorm.weight", f"{megatron}{norm}", hidden)
        if is_dense:
            gated_mlp(table, f"{hf}mlp.", f"{megatron}mlp.", hidden, model.ffn_hidden_size)
        else:
            _experts(table, model, f"{hf}mlp.", f"{megatron}mlp.")
    embeddings(table, model, vocab_size)
    return table.build()


def _latent_attention(table: TableBuilder, model: ModelConfig, hf: str, megatron: str) -> None:
    hidden, heads, shape = model.hidden_size, model.num_attention_heads, LatentShape.of(model)
    queries = heads * shape.query
    if model.q_lora_rank is None:
        table.same(f"{hf}q_proj.weight", f"{megatron}linear_q_proj.weight", queries, hidden)
    else:
        rank = model.q_lora_rank
        table.same(f"{hf}q_a_proj.weight", f"{megatron}linear_q_down_proj.weight", rank, hidden)
        table.same(f"{hf}q_a_layernorm.weight", f"{megatron}linear_q_up_proj.layer_norm_weight", rank)
        table.same(f"{hf}q_b_proj.weight", f"{megatron}linear_q_up_proj.weight", queries, rank)
    down, up = shape.latent + shape.rope, heads * shape.key_and_value
    table.same(f"{hf}kv_a_proj_with_mqa.weight", f"{megatron}linear_kv_down_proj.weight", down, hidden)
    table.same(f"{hf}kv_a_layernorm.weight", f"{megatron}linear_kv_up_proj.layer_norm_weight", shape.latent)
    table.same(f"{hf}kv_b_proj.weight", f"{megatron}linear_kv_up_proj.weight", up, shape.latent)
    table.same(f"{hf}o_proj.weight", f"{megatron}linear_proj.weight", hidden, heads * shape.value)


def _experts(table: TableBuilder, model: ModelConfig, hf: str, megatron: str) -> None:
    hidden, ffn = model.hidden_size, model.expert_ffn_hidden_size or model.ffn_hidden_size
    experts = num_experts(model)
    table.same(f"{hf}gate.weight", f"{megatron}router.weight", experts, hidden)
    if model.router_bias:
        table.same(f"{hf}gate.e_score_correction_bias", f"{megatron}router.expert_bias", experts, fp32=True)
    for expert in range(experts):
        gated_mlp(table, f"{hf}experts.{expert}.", f"{megatron}experts.{expert}.", hidden, ffn)
    if model.shared_expert_ffn_hidden_size is not None:
        shared = model.shared_expert_ffn_hidden_size
        gated_mlp(table, f"{hf}shared_experts.", f"{megatron}shared_experts.", hidden, shared)


def is_dropped(hf_name: str, model: ModelConfig) -> bool:
    """Return whether a checkpoint's tensor belongs to one of the further layers, which are not part of the model."""
    layer = _LAYER.match(hf_name)
    return layer is not None and int(layer[1]) >= model.num_layers


# Keys about training or other software, and keys that repeat others.
_IGNORED = frozenset(
    {
        "aux_loss_alpha", "auto_map", "ep_size", "head_dim", "num_key_value_heads", "num_nextn_predict_layers",
        "qk_head_dim", "seq_aux",
    }
)  # fmt: skip
DEEPSEEK_V3 = Family("DeepseekV3ForCausalLM", read_config, write_config, weight_table, is_dropped, _IGNORED)

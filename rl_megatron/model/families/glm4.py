"""GLM-4 without experts (0414): norms around attention and MLP, and RoPE on adjacent pairs in half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.decoder import read_decoder, write_decoder
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.table import Layer, TableBuilder, WeightTable, add_normed_attention, build_decoder_table

ROTATED = 0.5  # the default part of each head that RoPE rotates, in all GLM-4 models


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        **read_decoder(hf, ROTATED) | {"head_dim": hf["head_dim"]},  # required: transformers' default is 128
        rope_interleaved=True,
        sandwich_norms=True,
        qkv_bias=hf["attention_bias"],
    )


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    keys = write_glm(GLM4.architecture, "glm4", model, vocab_size)
    return keys | {"pad_token_id": None}  # transformers' default id may be outside the vocabulary


def write_glm(architecture: str, model_type: str, model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the keys of config.json that GLM's dense models and those with experts share."""
    written, share = write_decoder(architecture, model_type, model, vocab_size), model.partial_rotary_factor
    written["rope_parameters"] |= {"partial_rotary_factor": share}
    return written | {"partial_rotary_factor": share, "attention_bias": model.qkv_bias}


def build_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    return build_decoder_table(model, vocab_size, add_normed_attention, _add_sandwiched_mlp)


def _add_sandwiched_mlp(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    _, hf, megatron = layer
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    table.add(f"{hf}post_self_attn_layernorm.weight", f"{megatron}post_self_attn_layernorm.weight", hidden)
    table.add(f"{hf}post_attention_layernorm.weight", f"{megatron}mlp.linear_fc1.layer_norm_weight", hidden)
    table.add(f"{hf}mlp.gate_up_proj.weight", f"{megatron}mlp.linear_fc1.weight", 2 * ffn, hidden)
    table.add(f"{hf}mlp.down_proj.weight", f"{megatron}mlp.linear_fc2.weight", hidden, ffn)
    table.add(f"{hf}post_mlp_layernorm.weight", f"{megatron}post_mlp_layernorm.weight", hidden)


GLM4 = Family("Glm4ForCausalLM", read_config, write_config, build_table)

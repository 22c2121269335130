"""Llama 3 (and 2): RMSNorm, SwiGLU, RoPE (from 3.1 on scaled), grouped queries, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.schema import ModelConfig
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.rope import read_rope, write_rope
from rl_megatron.model.families.table import dense_decoder, head_size


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf.get("num_key_value_heads") or hf["num_attention_heads"],
        head_dim=hf.get("head_dim"),
        max_sequence_length=hf["max_position_embeddings"],
        **read_rope(hf),
        norm_epsilon=hf["rms_norm_eps"],
        tie_embeddings=hf.get("tie_word_embeddings", False),
        vocab_size=hf["vocab_size"],
    )


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": [LLAMA.architecture],
        "model_type": "llama",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": head_size(model),
        "max_position_embeddings": model.max_sequence_length,
        **write_rope(model),
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": vocab_size,
    }


LLAMA = Family("LlamaForCausalLM", read_config, write_config, dense_decoder)

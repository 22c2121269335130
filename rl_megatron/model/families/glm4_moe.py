"""GLM-4.5 to 4.7: DeepSeek-V3's experts, grouped queries, and RoPE on the first half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.biased_experts import add_dense_or_experts, is_dropped, read_experts, write_experts
from rl_megatron.model.families.decoder import read_decoder
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.glm4 import ROTATED, write_glm
from rl_megatron.model.families.table import WeightTable, add_normed_attention, build_decoder_table


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(
        **read_decoder(hf, ROTATED),
        qkv_bias=hf["attention_bias"],
        qk_norm=hf.get("use_qk_norm", False),
        **read_experts(hf),
    )


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    keys = write_glm(GLM4_MOE.architecture, "glm4_moe", model, vocab_size)
    return keys | {"use_qk_norm": model.qk_norm} | write_experts(model)


def build_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    return build_decoder_table(model, vocab_size, add_normed_attention, add_dense_or_experts)


_IGNORED = frozenset({"num_mtp_layers", "num_nextn_predict_layers"})  # keys of dropped layers
GLM4_MOE = Family("Glm4MoeForCausalLM", read_config, write_config, build_table, is_dropped, _IGNORED)

"""Qwen3: Llama with RMSNorm on each head's queries and keys, and a head size that is set explicitly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.decoder import read_decoder, read_window, write_decoder, write_window
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.hf_config import require_only
from rl_megatron.model.families.table import dense_decoder
from rl_megatron.model.families.with_images import WithImages


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    require_only(hf, use_qk_norm=True, attention_bias=False)
    decoder = read_decoder(hf) | {"head_dim": hf["head_dim"]}  # required: transformers' default is always 128
    return ModelConfig(**decoder, qk_norm=True, sliding_window=read_window(hf))


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    decoder = write_decoder(QWEN3.architecture, "qwen3", model, vocab_size)
    return decoder | {"attention_bias": False} | write_window(model)


_WITH_IMAGES = WithImages("Qwen3VLForConditionalGeneration", "qwen3_vl_text", model_type="qwen3")
QWEN3 = Family("Qwen3ForCausalLM", read_config, write_config, dense_decoder, with_images=_WITH_IMAGES)

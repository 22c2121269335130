"""Llama 2 and 3: RMSNorm, SwiGLU, RoPE (scaled since 3.1), grouped queries, no biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.decoder import read_decoder, write_decoder
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.hf_config import require_only
from rl_megatron.model.families.table import dense_decoder


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    require_only(hf, attention_bias=False, mlp_bias=False)
    return ModelConfig(**read_decoder(hf))


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    decoder = write_decoder(LLAMA.architecture, "llama", model, vocab_size)
    return decoder | {"attention_bias": False, "mlp_bias": False}


LLAMA = Family("LlamaForCausalLM", read_config, write_config, dense_decoder)

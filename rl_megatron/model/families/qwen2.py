"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.decoder import read_decoder, read_window, write_decoder, write_window
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.table import dense_decoder


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(**read_decoder(hf), qkv_bias=True, sliding_window=read_window(hf))


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return write_decoder(QWEN2.architecture, "qwen2", model, vocab_size) | write_window(model)


QWEN2 = Family("Qwen2ForCausalLM", read_config, write_config, dense_decoder)

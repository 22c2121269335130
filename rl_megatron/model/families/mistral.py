"""Mistral: Llama with a sliding attention window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.decoder import read_decoder, write_decoder
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.table import dense_decoder
from rl_megatron.model.families.with_images import WithImages


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(**read_decoder(hf), sliding_window=hf["sliding_window"])  # null means that there is no window


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return write_decoder(MISTRAL.architecture, "mistral", model, vocab_size) | {"sliding_window": model.sliding_window}


_WITH_IMAGES = WithImages("Mistral3ForConditionalGeneration", "mistral")
MISTRAL = Family("MistralForCausalLM", read_config, write_config, dense_decoder, with_images=_WITH_IMAGES)

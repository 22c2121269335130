"""Mixtral: Mistral with a mixture of experts in every layer. The weights of a token's experts sum to 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.decoder import read_decoder, write_decoder
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.hf_config import require_only
from rl_megatron.model.families.table import ExpertNames, WeightTable, build_mixture_table

_NAMES = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", gate="w1", up="w3", down="w2")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    require_only(hf, router_jitter_noise=0.0)
    return ModelConfig(
        **read_decoder(hf),
        sliding_window=hf.get("sliding_window"),
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
    )


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return write_decoder(MIXTRAL.architecture, "mixtral", model, vocab_size) | {
        "intermediate_size": model.expert_ffn_hidden_size or model.ffn_hidden_size,
        "sliding_window": model.sliding_window,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_aux_loss,
    }


def build_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    return build_mixture_table(model, vocab_size, _NAMES)


MIXTRAL = Family("MixtralForCausalLM", read_config, write_config, build_table)

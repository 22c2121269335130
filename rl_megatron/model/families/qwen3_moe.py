"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.decoder import read_decoder, write_decoder
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.hf_config import require_only
from rl_megatron.model.families.table import ExpertNames, WeightTable, build_mixture_table

_NAMES = ExpertNames("mlp.gate", "mlp.experts", gate="gate_proj", up="up_proj", down="down_proj")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    require_only(hf, use_qk_norm=True, attention_bias=False, use_sliding_window=False, decoder_sparse_step=1)
    hf.get("sliding_window")  # marked as read: it has no effect without use_sliding_window
    if hf.get("mlp_only_layers"):
        raise ConfigError(
            f"config.json: mlp_only_layers={hf['mlp_only_layers']} is not supported: every layer must have experts"
        )
    return ModelConfig(
        **read_decoder(hf),
        qk_norm=True,
        # transformers 5 writes num_local_experts. transformers 4 and the published files have num_experts.
        num_experts=hf["num_local_experts"] if "num_local_experts" in hf else hf["num_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        expert_ffn_hidden_size=hf["moe_intermediate_size"],
        normalize_expert_weights=hf["norm_topk_prob"],
    )


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return write_decoder(QWEN3_MOE.architecture, "qwen3_moe", model, vocab_size) | {
        "attention_bias": False,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_ffn_hidden_size or model.ffn_hidden_size,
        "norm_topk_prob": model.normalize_expert_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
        "router_aux_loss_coef": model.router_aux_loss,
    }


def build_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    return build_mixture_table(model, vocab_size, _NAMES)


QWEN3_MOE = Family("Qwen3MoeForCausalLM", read_config, write_config, build_table)

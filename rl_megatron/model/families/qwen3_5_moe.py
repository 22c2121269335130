"""Qwen3.5's text models with experts: a mixture of experts and a gated shared expert in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.qwen3_5 import (
    IGNORED,
    add_attention_or_delta_rule,
    is_dropped,
    read_hybrid,
    write_hybrid,
)
from rl_megatron.model.families.table import (
    ExpertNames,
    Layer,
    TableBuilder,
    WeightTable,
    add_experts,
    add_experts_norm,
    add_gated_mlp,
    build_decoder_table,
)
from rl_megatron.model.families.with_images import WithImages

_NAMES = ExpertNames("mlp.gate", "mlp.experts", gate="gate_proj", up="up_proj", down="down_proj")


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    if hf.get("mlp_only_layers"):
        raise ConfigError(
            f"config.json: mlp_only_layers={hf['mlp_only_layers']} is not supported: every layer must have experts"
        )
    return ModelConfig(
        **read_hybrid(hf, width="moe_intermediate_size"),
        # transformers and the published files have num_experts. transformers also reads num_local_experts.
        num_experts=hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        shared_expert_ffn_hidden_size=hf["shared_expert_intermediate_size"],
        shared_expert_gate=True,
    )


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    written = write_hybrid(QWEN3_5_MOE.architecture, "qwen3_5_moe_text", model, vocab_size)
    del written["intermediate_size"]
    return written | {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_ffn_hidden_size or model.ffn_hidden_size,
        "shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size,
        "router_aux_loss_coef": model.router_aux_loss,
    }


def build_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    return build_decoder_table(model, vocab_size, add_attention_or_delta_rule, add_experts_norm, _add_all_experts)


def _add_all_experts(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    add_experts(table, model, layer, _NAMES)
    hf, megatron = f"{layer.hf}mlp.shared_expert", f"{layer.megatron}mlp.shared_experts."
    add_gated_mlp(table, f"{hf}.", megatron, model.hidden_size, model.shared_expert_ffn_hidden_size or 0)
    table.add(f"{hf}_gate.weight", f"{megatron}gate_weight", 1, model.hidden_size)


QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM", read_config, write_config, build_table, is_dropped, IGNORED,
    WithImages("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
    {"mlp.experts.gate_up_proj": ("gate_proj", "up_proj"), "mlp.experts.down_proj": ("down_proj",)},
)  # fmt: skip

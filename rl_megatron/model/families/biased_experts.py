"""The experts of DeepSeek-V3 and GLM-4.5: chosen by sigmoid scores and a bias, beside shared experts.

The first layers are dense. A checkpoint has further layers at the end, which predict more than one token ahead
(`num_nextn_predict_layers`). They are not part of the model here, nor of transformers' forward pass. `is_dropped`
recognizes their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import num_experts
from rl_megatron.model.families.table import Layer, TableBuilder, add_gated_mlp

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def read_experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model section's keys about experts, or an empty dict if all layers are dense."""
    dense = hf["first_k_dense_replace"]
    if dense >= hf["num_hidden_layers"]:
        return {}
    groups, visited = hf["n_group"] or 1, hf["topk_group"] or 1
    return {
        "num_experts": hf["n_routed_experts"],
        "experts_per_token": hf["num_experts_per_tok"],
        "expert_ffn_hidden_size": hf["moe_intermediate_size"],
        "shared_expert_ffn_hidden_size": hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0) or None,
        "normalize_expert_weights": hf["norm_topk_prob"],
        "first_dense_layers": dense,
        "router_score": "sigmoid",
        "router_bias": True,
        **({} if visited >= groups else {"router_groups": groups, "router_groups_per_token": visited}),
        "routed_scaling_factor": hf["routed_scaling_factor"],
    }


def write_experts(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json about experts."""
    ffn = model.expert_ffn_hidden_size or model.ffn_hidden_size
    return {
        "n_routed_experts": model.num_experts or 1,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": ffn,
        "n_shared_experts": (model.shared_expert_ffn_hidden_size or 0) // ffn,
        "norm_topk_prob": model.normalize_expert_weights,
        "first_k_dense_replace": model.num_layers if model.num_experts is None else model.first_dense_layers,
        "n_group": model.router_groups or 1,
        "topk_group": model.router_groups_per_token or 1,
        "routed_scaling_factor": model.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
    }


def add_dense_or_experts(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    """Add a layer's MLP and the norm before it: a dense MLP, or a router with its bias, experts and shared experts."""
    _, hf, megatron = layer
    hidden = model.hidden_size
    is_dense = model.num_experts is None or layer.number < model.first_dense_layers
    norm = "mlp.linear_fc1.layer_norm_weight" if is_dense else "pre_mlp_layernorm.weight"
    table.add(f"{hf}post_attention_layernorm.weight", f"{megatron}{norm}", hidden)
    if is_dense:
        add_gated_mlp(table, f"{hf}mlp.", f"{megatron}mlp.", hidden, model.ffn_hidden_size)
    else:
        _add_experts(table, model, f"{hf}mlp.", f"{megatron}mlp.")


def _add_experts(table: TableBuilder, model: ModelConfig, hf: str, megatron: str) -> None:
    hidden, ffn = model.hidden_size, model.expert_ffn_hidden_size or model.ffn_hidden_size
    experts = num_experts(model)
    table.add(f"{hf}gate.weight", f"{megatron}router.weight", experts, hidden)
    if model.router_bias:
        table.add(f"{hf}gate.e_score_correction_bias", f"{megatron}router.expert_bias", experts, fp32=True)
    for expert in range(experts):
        add_gated_mlp(table, f"{hf}experts.{expert}.", f"{megatron}experts.{expert}.", hidden, ffn)
    if model.shared_expert_ffn_hidden_size is not None:
        shared = model.shared_expert_ffn_hidden_size
        add_gated_mlp(table, f"{hf}shared_experts.", f"{megatron}shared_experts.", hidden, shared)


def is_dropped(hf_name: str, model: ModelConfig) -> bool:
    """Return whether a checkpoint's tensor belongs to a layer after the model's last one."""
    layer = _LAYER.match(hf_name)
    return layer is not None and int(layer[1]) >= model.num_layers

"""gpt-oss: attention with sinks, a sliding window in every second layer, biases everywhere, and a clamped SwiGLU.

A checkpoint stacks the transposed matrices of a layer's experts in one tensor. Columns of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import num_experts
from rl_megatron.model.families.decoder import layer_types, read_decoder, read_period, write_decoder
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.hf_config import require_only
from rl_megatron.model.families.table import (
    Layer,
    TableBuilder,
    WeightTable,
    add_experts_norm,
    add_normed_attention,
    build_decoder_table,
)

_PERIOD = 2  # every second layer has no window, by default


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    require_only(hf, attention_bias=True, swiglu_alpha=1.702, swiglu_limit=7.0)
    if hf.get("quantization_config"):  # the published weights are in MXFP4
        raise ConfigError(
            f"config.json: quantization_config={hf['quantization_config']!r} is not supported; load the model with "
            "transformers' Mxfp4Config(dequantize=True), save it in bf16, and import that"
        )
    every = read_period(hf["layer_types"]) if hf.get("layer_types") else _PERIOD
    return ModelConfig(
        **read_decoder(hf) | {"head_dim": hf["head_dim"]},  # required: transformers' default is always 64
        qkv_bias=True,
        linear_bias=True,
        attention_sinks=True,
        activation="swiglu_oai",
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        **({} if every is None else {"sliding_window": hf["sliding_window"], "global_attention_every": every}),
    )


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return write_decoder(GPT_OSS.architecture, "gpt_oss", model, vocab_size) | {
        "intermediate_size": model.expert_ffn_hidden_size or model.ffn_hidden_size,
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sliding_window": model.sliding_window,
        "layer_types": layer_types(model.num_layers, model.global_attention_every),
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "router_aux_loss_coef": model.router_aux_loss,
    }


def build_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    return build_decoder_table(model, vocab_size, add_normed_attention, add_experts_norm, _add_experts)


def _add_experts(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    _, hf, megatron = layer
    hidden, ffn = model.hidden_size, model.expert_ffn_hidden_size or model.ffn_hidden_size
    experts = num_experts(model)
    hf, megatron = f"{hf}mlp.", f"{megatron}mlp."
    table.add(f"{hf}router.weight", f"{megatron}router.weight", experts, hidden)
    table.add(f"{hf}router.bias", f"{megatron}router.bias", experts)
    for expert in range(experts):
        theirs, ours = f"{hf}experts.", f"{megatron}experts.{expert}."
        both = 2 * ffn
        table.add_slabs(f"{theirs}gate_up_proj", f"{ours}linear_fc1.weight", expert, experts, hidden, both, step=2)
        table.add_slabs(f"{theirs}gate_up_proj_bias", f"{ours}linear_fc1.bias", expert, experts, both, step=2)
        table.add_slabs(f"{theirs}down_proj", f"{ours}linear_fc2.weight", expert, experts, ffn, hidden)
        table.add_slabs(f"{theirs}down_proj_bias", f"{ours}linear_fc2.bias", expert, experts, hidden)


# The first two keys repeat others. sliding_window is not read if no layer has a window.
_IGNORED = frozenset({"experts_per_token", "initial_context_length", "sliding_window"})
GPT_OSS = Family("GptOssForCausalLM", read_config, write_config, build_table, ignored=_IGNORED)

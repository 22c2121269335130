"""Qwen3.5's text models without experts: the gated delta rule in most layers, gated attention in every n-th one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import DeltaShape, LayerKind
from rl_megatron.model.families.decoder import GLOBAL, read_decoder, write_decoder
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.hf_config import require_only
from rl_megatron.model.families.table import (
    Layer,
    TableBuilder,
    WeightTable,
    add_normed_attention,
    add_normed_mlp,
    build_decoder_table,
)
from rl_megatron.model.families.with_images import WithImages

_DELTA_RULE = "linear_attention"  # the value of `layer_types` for a layer with the gated delta rule
_PERIOD, _ROTATED = 4, 0.25  # defaults of transformers
_IMAGE_KEYS = frozenset({"mrope_section", "mrope_interleaved"})  # a text token has the same position in all sections
_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig(**read_hybrid(hf))


def read_hybrid(hf: Mapping[str, Any], width: str = "intermediate_size") -> dict[str, Any]:
    """Return the keys of the model section that models with and without experts share.

    `width` is the key of config.json for the inner width of the MLP.
    """
    require_only(hf, attention_bias=False, attn_output_gate=True, mamba_ssm_dtype="float32")
    return {
        **read_decoder(hf, _ROTATED, width, _IMAGE_KEYS),
        "head_dim": hf["head_dim"],  # required: transformers' default is 256
        "zero_centered_norm": True,
        "qk_norm": True,
        "attention_output_gate": True,
        "full_attention_every": _read_period(hf),
        **{key: hf[key] for key in _SIZES},
    }


def _read_period(hf: Mapping[str, Any]) -> int:
    """Return the n for which every n-th layer has attention and all others have the gated delta rule."""
    every = hf.get("full_attention_interval") or _PERIOD
    kinds = hf.get("layer_types") or _list_layer_types(hf["num_hidden_layers"], every)
    if GLOBAL in kinds:
        every = kinds.index(GLOBAL) + 1
    elif len(kinds) >= every:
        every = len(kinds) + 1
    if kinds != _list_layer_types(hf["num_hidden_layers"], every):
        raise ConfigError(
            f"layer_types={list(kinds)} is not supported; every n-th layer must be {GLOBAL}, and all others "
            f"{_DELTA_RULE}"
        )
    return every


def _list_layer_types(num_layers: int, every: int) -> list[str]:
    return [GLOBAL if layer % every == 0 else _DELTA_RULE for layer in range(1, num_layers + 1)]


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    return write_hybrid(QWEN3_5.architecture, "qwen3_5_text", model, vocab_size)


def write_hybrid(architecture: str, model_type: str, model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the keys of config.json that models with and without experts share, from the model section."""
    written = write_decoder(architecture, model_type, model, vocab_size)
    written["rope_parameters"] |= {"partial_rotary_factor": model.partial_rotary_factor}
    every = model.full_attention_every or 1
    return written | {
        "partial_rotary_factor": model.partial_rotary_factor,
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": every,
        "layer_types": _list_layer_types(model.num_layers, every),
        **{key: getattr(model, key) for key in _SIZES},
    }


def build_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    return build_decoder_table(model, vocab_size, add_attention_or_delta_rule, add_normed_mlp)


def add_attention_or_delta_rule(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    """Add the norm before the attention, and the attention or the gated delta rule."""
    if not LayerKind.from_model(model, layer.number).has_delta_rule:
        add_normed_attention(table, model, layer)
        return
    _, hf, megatron = layer
    hidden, shape = model.hidden_size, DeltaShape.from_model(model)
    values = shape.values * shape.value
    norm = f"{megatron}self_attention.linear_in_proj.layer_norm_weight"
    table.add(f"{hf}input_layernorm.weight", norm, hidden)
    hf, megatron = f"{hf}linear_attn.", f"{megatron}self_attention."
    blocks = [(f"{hf}in_proj_qkv.weight", rows) for rows in (shape.key, shape.key, values)]
    others = {"in_proj_b": shape.values, "in_proj_a": shape.values, "in_proj_z": values}
    blocks += [(f"{hf}{part}.weight", rows) for part, rows in others.items()]
    table.add_interleaved(f"{megatron}linear_in_proj.weight", blocks, shape.groups, hidden)
    channels = [(f"{hf}conv1d.weight", rows) for rows in (shape.key, shape.key, values)]
    table.add_interleaved(f"{megatron}core_attention.conv", channels, shape.groups, 1, shape.kernel)
    for name in ("A_log", "dt_bias"):
        table.add(f"{hf}{name}", f"{megatron}core_attention.{name}", shape.groups * shape.values)
    table.add(f"{hf}norm.weight", f"{megatron}out_norm.weight", shape.value)
    table.add(f"{hf}out_proj.weight", f"{megatron}linear_proj.weight", hidden, shape.groups * values)


def is_dropped(hf_name: str, model: ModelConfig) -> bool:
    """Return whether a tensor belongs to the multi-token prediction layers, which transformers ignores, too."""
    return hf_name.startswith("mtp.")


IGNORED = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})  # keys of dropped layers
QWEN3_5 = Family(
    "Qwen3_5ForCausalLM", read_config, write_config, build_table, is_dropped, IGNORED,
    WithImages("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
)  # fmt: skip

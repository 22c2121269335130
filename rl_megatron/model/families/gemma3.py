"""Gemma 3 (text): zero-centred norms before and after attention and MLP, and layers with and without a sliding window.

Every sixth layer has no window. The others have a window and their own RoPE base. The activation is GELU, queries and
keys are normed, and the embeddings are tied and scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig, YarnRope
from rl_megatron.config.model_shape import head_size
from rl_megatron.model.families.decoder import GLOBAL, LOCAL, layer_types, read_period
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.rope import DEFAULT_BASE, read_scaling, write_scaling
from rl_megatron.model.families.table import (
    Layer,
    TableBuilder,
    WeightTable,
    add_gated_mlp,
    add_normed_attention,
    build_decoder_table,
)
from rl_megatron.model.families.with_images import WithImages

_GLOBAL_BASE = 1_000_000.0  # the RoPE base of layers without a window, if config.json lacks it
_PATTERN = 6  # the period of layers without a window, if config.json lacks it
# Keys that must have one of these values, because no other value is supported.
_ABSENT: dict[str, tuple] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "attention_bias": (None, False),
    "hidden_activation": (None, "gelu_pytorch_tanh"),
}


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    for key, absent in _ABSENT.items():
        if hf.get(key) not in absent:
            raise ConfigError(f"{key}={hf[key]} is not supported; Gemma 3 needs {key}={absent[-1]} here")
    every = _global_attention_every(hf)
    windows = {}
    if every is not None:
        windows = {"sliding_window": hf["sliding_window"], "global_attention_every": every}
    return ModelConfig(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        num_query_groups=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        max_sequence_length=hf["max_position_embeddings"],
        norm_epsilon=hf["rms_norm_eps"],
        tie_embeddings=hf.get("tie_word_embeddings", True),
        vocab_size=hf["vocab_size"],
        query_pre_attn_scalar=hf["query_pre_attn_scalar"],
        qk_norm=True,
        zero_centered_norm=True,
        sandwich_norms=True,
        activation="gelu_tanh",
        scale_embeddings=True,
        **windows,
        **_read_ropes(hf, with_local=every is not None),
    )


def _global_attention_every(hf: Mapping[str, Any]) -> int | None:
    """Return the period of layers without a window, or None if no layer has a window."""
    kinds, every = hf.get("layer_types"), hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern")
    if kinds is None:
        every = every or _PATTERN
        return None if every == 1 else every
    return read_period(kinds, every)


def _read_ropes(hf: Mapping[str, Any], with_local: bool) -> dict[str, Any]:
    longest = hf["max_position_embeddings"]
    if hf.get("rope_parameters"):
        whole, local = (hf["rope_parameters"].get(kind) or {} for kind in (GLOBAL, LOCAL))
        base, local_base = whole.get("rope_theta", _GLOBAL_BASE), local.get("rope_theta", DEFAULT_BASE)
        if with_local and read_scaling(local, f"rope_parameters.{LOCAL}", longest) is not None:
            raise ConfigError(
                f"rope_parameters.{LOCAL}={local} is not supported; RoPE of layers with a window must be unscaled"
            )
        scaling = read_scaling(whole, f"rope_parameters.{GLOBAL}", longest)
    else:
        base, local_base = hf.get("rope_theta", _GLOBAL_BASE), hf.get("rope_local_base_freq", DEFAULT_BASE)
        scaling = read_scaling(hf.get("rope_scaling") or {}, "rope_scaling", longest)
    if with_local and isinstance(scaling, YarnRope):
        raise ConfigError(
            "RoPE scaling of type yarn is not supported in a model with sliding windows; linear and llama3 are"
        )
    return {
        "rope_base": float(base),
        "rope_scaling": scaling,
        "local_rope_base": float(local_base) if with_local else None,
    }


def write_config(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    scaling, every = write_scaling(model.rope_scaling), model.global_attention_every
    local_base = DEFAULT_BASE if model.local_rope_base is None else model.local_rope_base
    return {
        "architectures": [GEMMA3.architecture],
        "model_type": "gemma3_text",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": head_size(model),
        "max_position_embeddings": model.max_sequence_length,
        "rope_parameters": {
            GLOBAL: {"rope_theta": model.rope_base, **(scaling or {"rope_type": "default"})},
            LOCAL: {"rope_theta": local_base, "rope_type": "default"},
        },
        "rope_theta": model.rope_base,  # this and the next two keys are for readers of transformers 4's configs
        "rope_local_base_freq": local_base,
        "rope_scaling": scaling,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": model.query_pre_attn_scalar or head_size(model),
        "sliding_window": model.sliding_window,
        "sliding_window_pattern": every,
        "layer_types": layer_types(model.num_layers, every),
        "vocab_size": vocab_size,
    }


def build_table(model: ModelConfig, vocab_size: int) -> WeightTable:
    return build_decoder_table(model, vocab_size, add_normed_attention, _add_sandwiched_mlp)


def _add_sandwiched_mlp(table: TableBuilder, model: ModelConfig, layer: Layer) -> None:
    _, hf, megatron = layer
    hidden = model.hidden_size
    table.add(f"{hf}post_attention_layernorm.weight", f"{megatron}post_self_attn_layernorm.weight", hidden)
    table.add(f"{hf}pre_feedforward_layernorm.weight", f"{megatron}mlp.linear_fc1.layer_norm_weight", hidden)
    add_gated_mlp(table, f"{hf}mlp.", f"{megatron}mlp.", hidden, model.ffn_hidden_size)
    table.add(f"{hf}post_feedforward_layernorm.weight", f"{megatron}post_mlp_layernorm.weight", hidden)


# Keys that may stay unread: other names, keys that others override, and a generation setting.
_IGNORED = frozenset(
    {
        "_sliding_window_pattern", "cache_implementation", "rope_local_base_freq", "sliding_window",
        "sliding_window_pattern",
    }
)  # fmt: skip
# The published files omit keys whose values equal these defaults of transformers.
_WITH_IMAGES = WithImages(
    "Gemma3ForConditionalGeneration",
    "gemma3_text",
    defaults={
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096,
    },
)  # fmt: skip
GEMMA3 = Family("Gemma3ForCausalLM", read_config, write_config, build_table, ignored=_IGNORED, with_images=_WITH_IMAGES)

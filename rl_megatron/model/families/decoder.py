"""Conversion between the model section and the keys of config.json that Llama and similar families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import head_size
from rl_megatron.model.families.hf_config import require_only
from rl_megatron.model.families.rope import read_rope, write_rope

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # the kinds of layers in `layer_types`


def read_decoder(
    hf: Mapping[str, Any],
    share: float | None = None,
    width: str = "intermediate_size",
    ignored_of_rope: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Return the keys of the model section that Llama and similar families share.

    Args:
        hf: The content of the config.json.
        share: The default share of each head that RoPE rotates, or None if it always rotates whole heads (`rope.py`).
        width: The key of config.json for the inner width of the MLP.
        ignored_of_rope: Keys of RoPE that do not change what this family computes.
    """
    require_only(hf, hidden_act="silu")
    return {
        "num_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "ffn_hidden_size": hf[width],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": hf.get("num_key_value_heads") or hf["num_attention_heads"],
        "head_dim": hf.get("head_dim"),
        "max_sequence_length": hf["max_position_embeddings"],
        "norm_epsilon": hf["rms_norm_eps"],
        "tie_embeddings": hf.get("tie_word_embeddings") or False,
        "vocab_size": hf["vocab_size"],
        **read_rope(hf, share, ignored_of_rope),
    }


def write_decoder(architecture: str, model_type: str, model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    """Return the keys of config.json that Llama and similar families share, from the model section."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": head_size(model),
        "hidden_act": "silu",
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.init_std,
        "vocab_size": vocab_size,
        **write_rope(model),
    }


def read_period(kinds: Sequence[str], every: int | None = None) -> int | None:
    """Return the period of layers without a sliding window in `layer_types`, or None if no layer has a window.

    Several periods may describe the same layers. `every`, the period from another key of config.json, is then
    preferred.
    """
    if LOCAL not in kinds:
        return None
    if every is None or list(kinds) != layer_types(len(kinds), every):
        every = kinds.index(GLOBAL) + 1 if GLOBAL in kinds else len(kinds) + 1
    if list(kinds) != layer_types(len(kinds), every):
        raise ConfigError(
            f"layer_types={list(kinds)} is not supported; every n-th layer must be {GLOBAL}, and all others {LOCAL}"
        )
    return every


def layer_types(num_layers: int, every: int | None) -> list[str]:
    """Return the kind of each layer: each `every`-th has no sliding window; if `every` is None, no layer has one."""
    return [GLOBAL if every is None or layer % every == 0 else LOCAL for layer in range(1, num_layers + 1)]


def read_window(hf: Mapping[str, Any]) -> int | None:
    """Return Qwen's sliding window, or None if no layer has it. A window in only some layers is refused.

    If `use_sliding_window` is true, layers have it as `layer_types` says, or by default from `max_window_layers` on.
    """
    window, layers = hf.get("sliding_window"), hf["num_hidden_layers"]
    first = hf.get("max_window_layers", 28)
    windowed = hf.get("use_sliding_window") and window is not None
    kinds = hf.get("layer_types") or [LOCAL if windowed and layer >= first else GLOBAL for layer in range(layers)]
    if set(kinds) == {GLOBAL}:
        return None
    if set(kinds) == {LOCAL} and windowed:
        return window
    raise ConfigError(
        f"config.json: sliding_window={window} in some layers only (layer_types, max_window_layers={first}) is not "
        "supported; all layers or none may have it"
    )


def write_window(model: ModelConfig) -> dict[str, Any]:
    """Return Qwen's keys of config.json for the sliding window."""
    windowed = model.sliding_window is not None
    return {
        "use_sliding_window": windowed,
        "sliding_window": model.sliding_window,
        "max_window_layers": 0 if windowed else model.num_layers,
    }

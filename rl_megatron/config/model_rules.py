"""Rules between keys of the model section."""

from __future__ import annotations

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import Llama3Rope, ModelConfig, YarnRope


def check_model(model: ModelConfig) -> None:
    """Raises: ConfigError where keys contradict each other, or one would do nothing."""
    if model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"model.num_query_groups={model.num_query_groups} must divide "
            f"model.num_attention_heads={model.num_attention_heads}"
        )
    if model.head_dim is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not a multiple of "
            f"model.num_attention_heads={model.num_attention_heads}; change one or set model.head_dim"
        )
    _check_rope(model)
    _check_windows(model)
    _check_experts(model)


def _check_rope(model: ModelConfig) -> None:
    scaling = model.rope_scaling
    if isinstance(scaling, Llama3Rope) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ConfigError(
            f"model.rope_scaling.low_freq_factor={scaling.low_freq_factor} must be less than "
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor}"
        )
    if isinstance(scaling, YarnRope) and scaling.beta_slow >= scaling.beta_fast:
        raise ConfigError(
            f"model.rope_scaling.beta_slow={scaling.beta_slow} must be less than "
            f"model.rope_scaling.beta_fast={scaling.beta_fast}"
        )


def _check_windows(model: ModelConfig) -> None:
    every = model.global_attention_every
    if every is not None and model.sliding_window is None:
        raise ConfigError(
            f"model.global_attention_every={every} does nothing: model.sliding_window=null is attention to all tokens "
            "in every layer; set model.sliding_window, or leave model.global_attention_every out"
        )
    if every == 1:
        raise ConfigError(
            "model.global_attention_every=1 leaves no layer with the window of model.sliding_window="
            f"{model.sliding_window}; set both to null, or global_attention_every to 2 or more"
        )
    if every is None and model.local_rope_base is not None:
        raise ConfigError(
            f"model.local_rope_base={model.local_rope_base} is of layers with a window beside layers without, and "
            "model.global_attention_every=null has no such two; set it, or model.rope_base alone"
        )


_OF_EXPERTS = (
    "experts_per_token",
    "expert_ffn_hidden_size",
    "shared_expert_ffn_hidden_size",
    "shared_expert_gate",
    "normalize_expert_weights",
    "router_aux_loss",
)


def _check_experts(model: ModelConfig) -> None:
    """Keys of a mixture of experts that contradict each other, or would do nothing."""
    if model.num_experts is None:
        default = ModelConfig()
        for key in _OF_EXPERTS:
            value = getattr(model, key)
            if value != getattr(default, key):
                raise ConfigError(
                    f"model.{key}={str(value).lower()} does nothing: model.num_experts=null is a dense model; set "
                    f"model.num_experts, or leave model.{key} out"
                )
    elif model.experts_per_token > model.num_experts:
        raise ConfigError(
            f"model.experts_per_token={model.experts_per_token} exceeds model.num_experts={model.num_experts}; lower it"
        )
    elif model.experts_per_token == 1 and model.normalize_expert_weights:
        raise ConfigError(
            "model.experts_per_token=1 and model.normalize_expert_weights=true: every weight would be 1 and the router "
            "would learn nothing; set normalize_expert_weights=false"
        )
    if model.shared_expert_gate and model.shared_expert_ffn_hidden_size is None:
        raise ConfigError(
            "model.shared_expert_gate=true: there is no shared expert; set model.shared_expert_ffn_hidden_size"
        )

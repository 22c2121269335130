"""Rules of the model section, of asynchronous training and of deterministic training."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rl_megatron.config.algorithm_kinds import PolicyGradientConfig
from rl_megatron.config.engines import ENGINE_DECLARATIONS
from rl_megatron.config.errors import ConfigError
from rl_megatron.config.extras import require_extra
from rl_megatron.config.model import Llama3Rope, ModelConfig, YarnRope
from rl_megatron.config.model_shape import head_size, rotary_size
from rl_megatron.config.rollout import TrajectoryConfig
from rl_megatron.config.schema import StageConfig

_DEFAULT = ModelConfig()


def check_model(model: ModelConfig) -> None:
    """Check the keys of the model section against one another, and that each of them has an effect."""
    _check_heads(model)
    _check_latents(model)
    _check_delta_rule(model)
    _check_biases(model)
    _check_rope(model)
    _check_windows(model)
    _check_experts(model)
    _check_router(model)


def _check_heads(model: ModelConfig) -> None:
    if model.num_attention_heads % model.num_query_groups:
        raise ConfigError(
            f"model.num_query_groups={model.num_query_groups} must divide "
            f"model.num_attention_heads={model.num_attention_heads}; change one of them"
        )
    derived = model.head_dim is None and model.kv_lora_rank is None
    if derived and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not a multiple of "
            f"model.num_attention_heads={model.num_attention_heads}; change one or set model.head_dim"
        )


_OF_LATENTS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NOT_WITH_LATENTS = (
    "head_dim", "qkv_bias", "qk_norm", "query_pre_attn_scalar", "sliding_window", "local_rope_base",
    "partial_rotary_factor", "rope_interleaved", "linear_bias", "attention_sinks", "attention_output_gate",
)  # fmt: skip


def _check_latents(model: ModelConfig) -> None:
    if model.kv_lora_rank is None:
        for key in _OF_LATENTS:
            if getattr(model, key) is not None:
                raise ConfigError(
                    f"model.{key}={getattr(model, key)} does nothing: model.kv_lora_rank=null is attention without "
                    f"latents; set model.kv_lora_rank, or leave model.{key} out"
                )
        return
    for key in _OF_LATENTS[1:]:
        if getattr(model, key) is None:
            raise ConfigError(f"model.{key}=null: model.kv_lora_rank={model.kv_lora_rank} needs this key; set it")
    for key in _NOT_WITH_LATENTS:
        value = getattr(model, key)
        if value != getattr(_DEFAULT, key):
            raise ConfigError(
                f"model.{key}={str(value).lower()} is not a key of latent attention, which "
                f"model.kv_lora_rank={model.kv_lora_rank} selects; leave one of them out"
            )
    if model.num_query_groups != model.num_attention_heads:
        raise ConfigError(
            f"model.num_query_groups={model.num_query_groups}: with model.kv_lora_rank every head has its own keys; "
            f"set it to model.num_attention_heads={model.num_attention_heads}"
        )
    if rotary_size(model) % 2:
        raise ConfigError(
            f"model.qk_rope_head_dim={model.qk_rope_head_dim} must be even: RoPE rotates pairs of dimensions"
        )


_OF_DELTA_RULE = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


def _check_delta_rule(model: ModelConfig) -> None:
    every = model.full_attention_every
    if every is None:
        for key in _OF_DELTA_RULE:
            if getattr(model, key) is not None:
                raise ConfigError(
                    f"model.{key}={getattr(model, key)} does nothing: with model.full_attention_every=null every layer "
                    f"has attention; set model.full_attention_every, or leave model.{key} out"
                )
        return
    if every == 1:
        raise ConfigError("model.full_attention_every=1 gives every layer attention; set it to null, or to 2 or more")
    for key in _OF_DELTA_RULE:
        if getattr(model, key) is None:
            raise ConfigError(f"model.{key}=null: model.full_attention_every={every} needs this key; set it")
    groups, heads = model.linear_num_key_heads, model.linear_num_value_heads
    assert groups is not None and heads is not None
    if heads % groups:
        raise ConfigError(
            f"model.linear_num_value_heads={heads} must be a multiple of model.linear_num_key_heads={groups}"
        )
    for key in ("linear_bias", "kv_lora_rank", "sliding_window"):
        value = getattr(model, key)
        if value != getattr(_DEFAULT, key):
            raise ConfigError(
                f"model.{key}={str(value).lower()} is not supported with model.full_attention_every={every}; leave one "
                "of them out"
            )


def _check_biases(model: ModelConfig) -> None:
    if model.linear_bias and not model.qkv_bias:
        raise ConfigError("model.linear_bias=true needs model.qkv_bias=true: it gives all linears a bias")
    if model.linear_bias and model.sandwich_norms:
        raise ConfigError("model.linear_bias=true is not supported with model.sandwich_norms=true; set one to false")
    if model.linear_bias and model.shared_expert_ffn_hidden_size is not None:
        raise ConfigError(
            "model.linear_bias=true is not supported with model.shared_expert_ffn_hidden_size="
            f"{model.shared_expert_ffn_hidden_size}; set linear_bias=false, or leave the shared expert out"
        )


def _check_rope(model: ModelConfig) -> None:
    scaling, share = model.rope_scaling, model.partial_rotary_factor
    if share > 1.0:
        raise ConfigError(f"model.partial_rotary_factor={share} must be at most 1, which rotates whole heads")
    if share < 1.0 and (rotary_size(model) == 0 or rotary_size(model) % 2):
        raise ConfigError(
            f"model.partial_rotary_factor={share} rotates {rotary_size(model)} of {head_size(model)} dimensions of a "
            "head; RoPE needs an even number of them, at least 2"
        )
    if isinstance(scaling, Llama3Rope) and scaling.low_freq_factor >= scaling.high_freq_factor:
        raise ConfigError(
            f"model.rope_scaling.low_freq_factor={scaling.low_freq_factor} must be less than "
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor}"
        )
    if isinstance(scaling, YarnRope) and scaling.beta_slow > scaling.beta_fast:
        raise ConfigError(
            f"model.rope_scaling.beta_slow={scaling.beta_slow} must not exceed "
            f"model.rope_scaling.beta_fast={scaling.beta_fast}"
        )
    if isinstance(scaling, YarnRope) and model.local_rope_base is not None:
        raise ConfigError(
            "model.rope_scaling.kind=yarn scales the scores of every layer, but layers with model.local_rope_base="
            f"{model.local_rope_base} must not be scaled; use linear or llama3, or set local_rope_base=null"
        )


def _check_windows(model: ModelConfig) -> None:
    every = model.global_attention_every
    if every is not None and model.sliding_window is None:
        raise ConfigError(
            f"model.global_attention_every={every} does nothing: with model.sliding_window=null every layer attends to "
            "all tokens; set model.sliding_window, or leave model.global_attention_every out"
        )
    if every == 1:
        raise ConfigError(
            "model.global_attention_every=1 leaves no layer with the window of model.sliding_window="
            f"{model.sliding_window}; set both to null, or global_attention_every to 2 or more"
        )
    if every is None and model.local_rope_base is not None:
        raise ConfigError(
            f"model.local_rope_base={model.local_rope_base} needs layers with and without a window, and "
            "model.global_attention_every=null makes all layers alike; set that key, or only model.rope_base"
        )


_OF_EXPERTS = (
    "experts_per_token",
    "expert_ffn_hidden_size",
    "shared_expert_ffn_hidden_size",
    "shared_expert_gate",
    "normalize_expert_weights",
    "router_aux_loss",
    "router_aux_loss_scope",
    "first_dense_layers",
    "router_score",
    "router_bias",
    "router_bias_update",
    "router_groups",
    "router_groups_per_token",
    "routed_scaling_factor",
)


def _check_experts(model: ModelConfig) -> None:
    """Check the keys of a mixture of experts, except those of its router."""
    if model.num_experts is None:
        for key in _OF_EXPERTS:
            value = getattr(model, key)
            if value != getattr(_DEFAULT, key):
                raise ConfigError(
                    f"model.{key}={str(value).lower()} does nothing: model.num_experts=null is a dense model; set "
                    f"model.num_experts, or leave model.{key} out"
                )
    elif model.router_aux_loss == 0 and model.router_aux_loss_scope != _DEFAULT.router_aux_loss_scope:
        raise ConfigError(
            f"model.router_aux_loss_scope={model.router_aux_loss_scope} has no effect: model.router_aux_loss=0 turns "
            "the balancing loss off; set it above 0, or leave model.router_aux_loss_scope out"
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
    if model.first_dense_layers >= model.num_layers:
        raise ConfigError(
            f"model.first_dense_layers={model.first_dense_layers} leaves none of model.num_layers={model.num_layers} "
            "layers to the experts; lower it, or set model.num_experts=null"
        )


def _check_router(model: ModelConfig) -> None:
    groups, visited, chosen = model.router_groups, model.router_groups_per_token, model.experts_per_token
    if model.router_score == "sigmoid" and chosen > 1 and not model.normalize_expert_weights:
        raise ConfigError(
            "model.normalize_expert_weights=false: with model.router_score=sigmoid the weights of several experts add "
            "up to 1 (before routed_scaling_factor); set it to true, or model.router_score=softmax"
        )
    if model.router_bias and model.router_score != "sigmoid":
        raise ConfigError("model.router_bias=true needs model.router_score=sigmoid; set it, or router_bias=false")
    if model.router_bias_update and not model.router_bias and model.num_experts is not None:
        raise ConfigError(
            f"model.router_bias_update={model.router_bias_update} does nothing: model.router_bias=false; set "
            "router_bias=true, or router_bias_update=0"
        )
    if (groups is None) != (visited is None):
        raise ConfigError(
            f"model.router_groups={groups} and model.router_groups_per_token={visited}: one does nothing without the "
            "other; set both or neither"
        )
    experts = model.num_experts
    if groups is None or visited is None or experts is None:
        return
    if experts % groups or experts // groups < 2:
        raise ConfigError(
            f"model.router_groups={groups} must divide model.num_experts={experts} into groups of two or more"
        )
    if visited >= groups:
        raise ConfigError(
            f"model.router_groups_per_token={visited} of model.router_groups={groups} excludes no group; lower it, or "
            "set both to null"
        )
    if chosen > visited * (experts // groups):
        raise ConfigError(
            f"model.experts_per_token={chosen} exceeds the {visited * (experts // groups)} experts of "
            f"model.router_groups_per_token={visited} groups of {experts // groups}; lower it"
        )
    if chosen // visited != 2:
        raise ConfigError(
            f"model.experts_per_token={chosen} must be {2 * visited} to {3 * visited - 1} with "
            f"model.router_groups_per_token={visited}: groups are compared by their best two experts"
        )


def check_vocabulary(model: ModelConfig, vocab_size: int) -> None:
    """Check that the embedding has a row for each of the tokenizer's tokens."""
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocab_size} tokens, but model.vocab_size={model.vocab_size} gives the embedding fewer "
            "rows; use the model's own tokenizer (tokenizer.path), or raise model.vocab_size for a new model"
        )


_KEYS = ("max_trajectory_age_steps", "in_flight_weight_updates", "over_sampling", "partial", "importance_correction")
_CORRECTS = "use_importance_sampling_correction"


def check_asynchronous(stage: StageConfig, where: str) -> None:
    """Check that the engine, the data, the loss and the keys of the section `rollout` suit each other."""
    rollout = stage.rollout
    if not rollout.recompute_kv_cache_after_weight_updates:
        raise ConfigError(
            f"{where}.recompute_kv_cache_after_weight_updates=false: no rollout engine of this package keeps keys and "
            "values of older weights; leave it true"
        )
    if not rollout.async_enabled:
        _refuse_keys(rollout, where)
        return
    if not isinstance(stage.algorithm, PolicyGradientConfig):
        return  # only policy-gradient stages are asynchronous; the key is for another stage of the run
    if rollout.over_sampling == 1 and not rollout.partial:
        raise ConfigError(
            f"{where}.partial=false has no effect with {where}.over_sampling=1, with which every step waits for all of "
            "its trajectories; set over_sampling above 1, or leave partial out"
        )
    require_extra(f"{where}.async_enabled=true, which writes all trajectories to files,", "data", "pyarrow")
    if rollout.is_asynchronous:
        _check_engine(stage, where)
        _check_data(stage, where)
    _check_correction(stage, where)


def _refuse_keys(rollout: TrajectoryConfig, where: str) -> None:
    default = TrajectoryConfig()
    for key in _KEYS:
        if getattr(rollout, key) != getattr(default, key):
            raise ConfigError(
                f"{where}.{key} has no effect without {where}.async_enabled=true; set that, or leave {key} out"
            )


def _check_engine(stage: StageConfig, where: str) -> None:
    name = stage.generation.engine
    if not ENGINE_DECLARATIONS[name].runs_in_processes:
        others = [other for other, engine in ENGINE_DECLARATIONS.items() if engine.runs_in_processes]
        raise ConfigError(
            f"{where}.async_enabled=true: generation.engine={name} computes on the ranks that train, so it cannot "
            f"generate meanwhile; set generation.engine={' or '.join(others)}, or {where}.max_trajectory_age_steps=0"
        )
    if name == "vllm" and stage.generation.vllm.enable_sleep_mode:
        raise ConfigError(
            f"{where}.async_enabled=true: generation.vllm.enable_sleep_mode=true frees the servers' memory during "
            "training steps, but they must generate then; set enable_sleep_mode=false, and give the servers GPUs of "
            "their own"
        )


def _check_data(stage: StageConfig, where: str) -> None:
    data = stage.data
    key = "data.streaming" if data.streaming else "data.mix_weights" if data.mix_weights is not None else None
    if key is not None:
        raise ConfigError(
            f"{where}.async_enabled=true reads prompts whenever the engine has space for them, but {key} needs them in "
            f"the order of steps; leave {key} out, or set {where}.async_enabled=false"
        )


def _check_correction(stage: StageConfig, where: str) -> None:
    """Check that the loss corrects for old trajectories as the section requires."""
    correction, loss = stage.rollout.correction, stage.loss
    name = loss.get("name")
    if correction == "recomputed" and _CORRECTS not in loss:
        raise ConfigError(
            f"{where}.importance_correction={stage.rollout.importance_correction}: loss.name={name} has no key "
            f"{_CORRECTS}, so it does not correct for trajectories of older weights; choose loss=clipped_pg, or set "
            f"{where}.importance_correction=engine if its ratio corrects for them, or =off for no correction"
        )
    if correction != "engine":
        return
    for key in ("force_on_policy_ratio", "disable_ppo_ratio", _CORRECTS):
        if loss.get(key):
            raise ConfigError(
                f"{where}.importance_correction=engine corrects by the ratio of the loss, π/π_generation, but "
                f"loss.{key}=true leaves this ratio out or makes it 1; set loss.{key}=false, or "
                f"{where}.importance_correction=recomputed"
            )
    if isinstance(stage.algorithm, PolicyGradientConfig) and stage.algorithm.recompute_logprobs == "always":
        raise ConfigError(
            f"{where}.importance_correction=engine takes π_prev from the engine, and algorithm.recompute_logprobs="
            "always computes it; set recompute_logprobs=auto"
        )


VLLM_SWITCH = "VLLM_BATCH_INVARIANT"


def check_deterministic(stage: StageConfig, environment: Mapping[str, str] = os.environ) -> None:
    """Check that attention, the rollout engine and rewards do not depend on timing, if `train.deterministic` is on.

    Servers that the run starts inherit this process's environment.
    """
    if stage.train.deterministic and stage.model.cudnn_attention:
        raise ConfigError(
            "train.deterministic=true and model.cudnn_attention=true: cuDNN sums gradients in no fixed order; set "
            "model.cudnn_attention=false"
        )
    if not (stage.train.deterministic and stage.scores_completions):
        return
    why = _why_engine_varies(stage, environment)
    if why is not None:
        raise ConfigError(
            f"train.deterministic=true and generation.engine={stage.generation.engine}: {why}, or choose "
            "generation.engine=embedded"
        )
    if stage.reward.on_timeout != "error":
        raise ConfigError(
            f"train.deterministic=true and reward.on_timeout={stage.reward.on_timeout}: the machine's load would "
            "decide the reward of a slow sample; set reward.on_timeout=error"
        )


def _why_engine_varies(stage: StageConfig, environment: Mapping[str, str]) -> str | None:
    """Return why a repeated run may sample other tokens, and the remedy; None if it samples the same ones."""
    generation = stage.generation
    if generation.engine == "transformers":
        return "its processes do not have this process's deterministic settings"
    if generation.engine == "vllm" and generation.vllm.urls:
        return "running servers batch requests in a way that depends on timing; let the run start its servers"
    if generation.engine == "vllm" and environment.get(VLLM_SWITCH) != "1":
        return (
            "the bits of a logprob depend on which requests are batched together, and thus on timing; set "
            f"{VLLM_SWITCH}=1 in the environment, if the GPU supports it"
        )
    if generation.engine == "sglang" and not generation.sglang.enable_deterministic_inference:
        return (
            "the bits of a logprob depend on which requests are batched together; set "
            "generation.sglang.enable_deterministic_inference=true"
        )
    return None

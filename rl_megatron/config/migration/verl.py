"""The keys of verl's configuration of GRPO and PPO (ppo_trainer.yaml and ppo_megatron_trainer.yaml)."""

from __future__ import annotations

from typing import Any

from rl_megatron.config.migration.keys import (
    Converted,
    Key,
    Library,
    Settings,
    compute,
    copy,
    if_true,
    ignore,
    ignore_each,
    keep_checkpoints,
    name_model,
    only_if,
    read_with,
    rename,
    report,
)

_ACTOR = "actor_rollout_ref.actor."
_ROLLOUT = "actor_rollout_ref.rollout."
_MODEL = "actor_rollout_ref.model."
_ESTIMATOR = "algorithm.adv_estimator"
_ENGINE = f"{_ROLLOUT}name"
_KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_RECOMPUTE = {"full": "full", "selective": "selective"}
_ESTIMATORS: dict[object, dict[str, object]] = {
    "gae": {"algorithm": "ppo"},
    "grpo": {"algorithm": "grpo"},
    "reinforce_plus_plus": {"algorithm": "grpo", "algorithm.advantage_estimator": "reinforce_plus_plus"},
    "reinforce_plus_plus_baseline": {
        "algorithm": "grpo",
        "algorithm.advantage_estimator": "reinforce_plus_plus_baseline",
    },
    "rloo": {"algorithm": "grpo", "algorithm.leave_one_out": True, "algorithm.normalize_std": False},
    "opo": {"algorithm": "grpo", "algorithm.advantage_estimator": "optimal_baseline"},
}
_AVERAGES: dict[object, dict[str, object]] = {
    "token-mean": {"loss.token_level_loss": True},
    "seq-mean-token-mean": {"loss.token_level_loss": False},
    "seq-mean-token-sum": {"loss.fixed_sequence_length": 1.0},
}
_LOSS_MODES: dict[object, dict[str, object]] = {
    "vanilla": {},
    "gspo": {"loss.sequence_level_importance_ratios": True, "loss.token_level_loss": False},
    "geo_mean": {"loss.use_gmpo": True, "loss.token_level_loss": False},
    "sapo": {"loss.use_sapo": True, "loss.token_level_loss": False},
    "cispo": {"loss.use_cispo": True},
    "clip_cov": {"loss.use_clip_cov": True},
    "kl_cov": {"loss.use_kl_cov": True},
}
_OWN_AVERAGE = ("gspo", "geo_mean", "sapo")  # modes that set the average themselves
_WITHOUT_DUAL_CLIP = ("gspo", "geo_mean", "sapo", "cispo", "clip_cov", "kl_cov")
_MODE = f"{_ACTOR}policy_loss.loss_mode"


def _convert_estimator(value: Any, settings: Settings) -> Converted:
    if value in _ESTIMATORS:
        return _ESTIMATORS[value]
    return f"these have a counterpart: {', '.join(map(str, _ESTIMATORS))}; or write your own advantage estimator"


def _convert_average(value: Any, settings: Settings) -> Converted:
    if settings.get(_MODE) in _OWN_AVERAGE:
        return None
    if value == "seq-mean-token-sum-norm":
        length = settings.get(f"{_ACTOR}loss_scale_factor") or settings.get("data.max_response_length")
        return {"loss.fixed_sequence_length": length}
    return _AVERAGES.get(value, f"these have a counterpart: {', '.join(map(str, _AVERAGES))}, seq-mean-token-sum-norm")


def _convert_mode(value: Any, settings: Settings) -> Converted:
    return _LOSS_MODES.get(value, f"these have a counterpart: {', '.join(map(str, _LOSS_MODES))}") or None


def _convert_kl(value: Any, settings: Settings) -> Converted:
    """Return the coefficient of the KL, which is in the reward, in the loss or off."""
    if settings.get("algorithm.use_kl_in_reward"):
        if value:
            return "the KL is in the reward or in the loss, not in both; here it is in the reward"
        return None
    return {"loss.reference_policy_kl_penalty": settings.get(f"{_ACTOR}kl_loss_coef", 0.001) if value else 0.0}


def _convert_kl_in_reward(value: Any, settings: Settings) -> Converted:
    if not value:
        return None
    if settings.get(_ESTIMATOR) not in ("gae", "reinforce_plus_plus"):
        return f"{_ESTIMATOR}={settings.get(_ESTIMATOR)} reads one reward per sample, which has no KL of tokens"
    return {
        "loss.use_kl_in_reward": True,
        "loss.reference_policy_kl_penalty": settings.get("algorithm.kl_ctrl.kl_coef", 0.001),
    }


def _convert_batch(value: Any, settings: Settings) -> Converted:
    return {"train.global_batch_size": value * settings.get(f"{_ROLLOUT}n", 1)}


def _convert_reward(value: Any, settings: Settings) -> Converted:
    name = settings.get("custom_reward_function.name", "compute_score")
    return {"reward.functions": [{"name": f"{value}:{name}"}]}


def _convert_truncation(value: Any, settings: Settings) -> Converted:
    if value != "token":
        return "only `token` has a counterpart; loss.sequence_rejection_type rejects sequences"
    return {
        "loss.use_importance_sampling_correction": True,
        "loss.truncated_importance_sampling_type": "tis",
        "loss.truncated_importance_sampling_ratio": settings.get(
            "algorithm.rollout_correction.rollout_is_threshold", 2.0
        ),
    }


def _convert_cap(value: Any, settings: Settings) -> Converted:
    if value <= 0:
        return None
    return {
        "loss.use_importance_sampling_correction": True,
        "loss.truncated_importance_sampling_type": "tis",
        "loss.truncated_importance_sampling_ratio": value,
    }


def _convert_clip(value: Any, settings: Settings) -> Converted:
    """Return the bounds that have no value of their own; verl's files give both one."""
    sides = {"loss.ratio_clip_min": "low", "loss.ratio_clip_max": "high"}
    bounds = {here: settings.get(f"{_ACTOR}clip_ratio_{side}", 0.2) for here, side in sides.items()}
    unset = {here: value for here, bound in bounds.items() if bound is None}
    if unset or value in bounds.values():
        return unset or None
    return "verl reads clip_ratio_low and clip_ratio_high, which are 0.2 by default: set loss.ratio_clip_min and _max"


def _convert_lora(value: Any, settings: Settings) -> Converted:
    return {"peft.r": value} if value else None


def _make_lora_key(rank: str, key: Key) -> Key:
    """Return a key that has an effect only if the rank is above 0."""
    return Key(
        key.here,
        key.note,
        lambda value, settings: key.translate(value, settings) if settings.get(rank) else None,
    )


def _convert_prompt_length(value: Any, settings: Settings) -> Converted:
    return {"model.max_sequence_length": value + settings.get("data.max_response_length", 512)}


def _convert_loggers(value: Any, settings: Settings) -> Converted:
    names = value if isinstance(value, list) else [value]
    here: dict[str, object] = {}
    project, run = settings.get("trainer.project_name"), settings.get("trainer.experiment_name")
    for name in names:
        if name in ("wandb", "swanlab"):
            here[f"logger.{name}"] = {"project": project, "name": run}
        elif name == "mlflow":
            here["logger.mlflow"] = {"experiment_name": project, "run_name": run}
        elif name not in ("console", "tensorboard"):
            return f"{name} has no counterpart; these do: console, tensorboard, wandb, mlflow, swanlab"
    return here or None


def _convert_files(here: str) -> Key:
    def convert(value: Any, settings: Settings) -> Converted:
        return {here: value[0] if isinstance(value, list) and len(value) == 1 else value}

    return Key((here,), "verl's Parquet files are read as they are", convert)


def _every(value: Any, settings: Settings) -> object:
    return max(value, 0)


def _convert_validation(value: Any, settings: Settings) -> Converted:
    return None if value == 1 else "set `n` and `temperature` of each set of eval.sets"


def _set_for_server(vllm: str, sglang: str) -> Key:
    """Return a key that is a setting of the servers, with a name for each engine."""
    here = {"vllm": f"generation.vllm.{vllm}", "sglang": f"generation.sglang.{sglang}"}

    def convert(value: Any, settings: Settings) -> Converted:
        engine = settings.get(_ENGINE)
        return {here[engine]: value} if engine in here else None

    return Key(tuple(here.values()), "", convert)


def _list_optimizer_keys(section: str, here: str) -> dict[str, Key]:
    def convert_ratio(value: Any, settings: Settings) -> Converted:
        styles = (settings.get(f"{section}{name}") for name in ("warmup_style", "lr_scheduler_type"))
        return {f"{here}min_lr": value * settings[f"{section}lr"]} if "cosine" in styles else None

    return {
        f"{section}lr": copy(f"{here}lr", "the default here, 1e-3, is for tiny models"),
        f"{section}min_lr": copy(f"{here}min_lr"),
        f"{section}weight_decay": copy(f"{here}weight_decay"),
        f"{section}clip_grad": copy(f"{here}clip_grad"),
        f"{section}grad_clip": copy(f"{here}clip_grad"),
        f"{section}betas": Key(
            (f"{here}beta1", f"{here}beta2"),
            "",
            lambda value, settings: {f"{here}beta1": value[0], f"{here}beta2": value[1]},
        ),
        f"{section}lr_warmup_steps": Key(
            (f"{here}warmup_steps",),
            "",
            lambda value, settings: None if value < 0 else {f"{here}warmup_steps": value},
        ),
        f"{section}lr_warmup_steps_ratio": report(
            f"set `{here}warmup_steps`, in optimizer steps", 0, 0.0, here=(f"{here}warmup_steps",)
        ),
        f"{section}lr_decay_style": copy(f"{here}decay_style", "`constant` there, `cosine` here by default"),
        f"{section}lr_scheduler_type": copy(f"{here}decay_style"),
        f"{section}warmup_style": copy(f"{here}decay_style"),
        f"{section}lr_decay_steps": copy(f"{here}decay_steps"),
        f"{section}optimizer": report(
            "the optimizer is always Adam with decoupled weight decay", "adam", "AdamW", "adamw"
        ),
        f"{section}lr_warmup_init": report("the warmup begins at 0", 0, 0.0),
        f"{section}min_lr_ratio": Key((f"{here}min_lr",), "times the learning rate", convert_ratio, (None, 0, 0.0)),
        f"{section}num_cycles": report("the learning rate falls once, by half a cosine", 0.5),
        f"{section}weight_decay_incr_style": report("the weight decay is constant", "constant"),
        f"{section}override_optimizer_config": report("set keys of the optimizer", {}),
        f"{section}override_optimizer_config.*": report("set keys of the optimizer"),
        **ignore_each(
            section,
            "_target_ total_training_steps lr_wsd_decay_style lr_wsd_decay_steps use_checkpoint_opt_param_scheduler",
            "the schedule ends with the stage",
        ),
    }


_LAYOUT = {
    "tensor_model_parallel_size": copy("parallel.tensor", "one layout for policy, critic and reference"),
    "sequence_parallel": Key(
        ("parallel.sequence",),
        "",
        lambda value, settings: (
            {"parallel.sequence": value}
            if settings.get(f"{_ACTOR}megatron.tensor_model_parallel_size", 1) > 1
            else None
        ),
    ),
    "pipeline_model_parallel_size": copy("parallel.pipeline"),
    "virtual_pipeline_model_parallel_size": copy("parallel.virtual_pipeline"),
    "context_parallel_size": copy("parallel.context"),
    "expert_model_parallel_size": copy("parallel.expert"),
    "expert_tensor_parallel_size": copy("parallel.expert_tensor", "1 here by default, not the tensor-parallel degree"),
    "use_distributed_optimizer": copy("optimizer.distributed"),
    "override_transformer_config.recompute_granularity": rename("model.recompute", _RECOMPUTE),
    "override_transformer_config.recompute_*": ignore("`full` recomputes every layer"),
    "override_transformer_config.*": report("set keys of `model`", False, [], "flash", ["core_attn"]),
    "dtype": rename("precision", {"bfloat16": "bf16", "float32": "fp32"}),
    "param_offload": report("the policy's weights stay on the device; see `generation.refit`", False),
    "optimizer_offload": report("the optimizer stays on the device", False),
    "grad_offload": report("gradients stay on the device", False),
    "seed": ignore("`train.seed` decides it too"),
    "override_ddp_config": report("set `optimizer.overlap`", {}, here=("optimizer.overlap",)),
    "override_ddp_config.*": report("set `optimizer.overlap`", here=("optimizer.overlap",)),
    "override_mcore_model_config": report("set keys of `model`", {}),
    "override_mcore_model_config.*": report("set keys of `model`"),
    **ignore_each(
        "",
        "_target_ use_dist_checkpointing dist_checkpointing_path dist_checkpointing_prefix use_mbridge vanilla_mbridge "
        "forward_only use_remove_padding load_weight",
        "any layout can load a checkpoint, and sequences are packed",
    ),
}

KEYS: dict[str, Key] = {
    _ESTIMATOR: Key(
        ("algorithm.advantage_estimator", "algorithm", "algorithm.leave_one_out", "algorithm.normalize_std"),
        "`gae` is `algorithm=ppo`; the others are `algorithm=grpo`",
        _convert_estimator,
    ),
    "algorithm.norm_adv_by_std_in_grpo": only_if(_ESTIMATOR, "grpo", copy("algorithm.normalize_std")),
    "algorithm.gamma": only_if(_ESTIMATOR, "gae", copy("algorithm.discount")),
    "algorithm.lam": only_if(_ESTIMATOR, "gae", copy("algorithm.gae_lambda", "1.0 there and 0.95 here by default")),
    "algorithm.use_kl_in_reward": Key(
        ("loss.use_kl_in_reward", "loss.reference_policy_kl_penalty"), "", _convert_kl_in_reward
    ),
    "algorithm.kl_penalty": only_if(
        "algorithm.use_kl_in_reward", True, rename("loss.reference_policy_kl_type", _KL_TYPES)
    ),
    "algorithm.kl_ctrl.type": report("the coefficient is fixed", "fixed"),
    "algorithm.kl_ctrl.kl_coef": read_with("algorithm.use_kl_in_reward", "loss.reference_policy_kl_penalty"),
    "algorithm.kl_ctrl.*": ignore("the coefficient is fixed"),
    "algorithm.filter_groups.enable": copy("algorithm.dynamic_sampling"),
    "algorithm.filter_groups.max_num_gen_batches": only_if(
        "algorithm.filter_groups.enable", True, copy("algorithm.dynamic_sampling_max_rounds", unused=(None, 0))
    ),
    "algorithm.filter_groups.metric": ignore("groups are compared by their rewards"),
    "algorithm.rollout_correction.rollout_is": Key(
        (
            "loss.use_importance_sampling_correction",
            "loss.truncated_importance_sampling_type",
            "loss.truncated_importance_sampling_ratio",
        ),
        "",
        _convert_truncation,
    ),
    "algorithm.rollout_correction.rollout_is_threshold": read_with(
        "algorithm.rollout_correction.rollout_is", "loss.truncated_importance_sampling_ratio"
    ),
    "algorithm.rollout_correction.rollout_rs": report(
        "set `loss.sequence_rejection_type`: geometric or k3", here=("loss.sequence_rejection_type",)
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": report(
        "set `loss.sequence_rejection_max`", here=("loss.sequence_rejection_max",)
    ),
    "algorithm.rollout_correction.bypass_mode": Key(
        ("rollout.importance_correction",),
        "with `rollout.async_enabled`",
        lambda value, settings: "set rollout.importance_correction=engine with rollout.async_enabled=true",
        (None, False),
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": report(
        "importance weights are not normalized over the batch", False
    ),
    "algorithm.rollout_correction.rollout_token_veto_threshold": copy("loss.token_veto_threshold"),
    "algorithm.rollout_correction.use_policy_gradient": report(
        "set `loss.disable_ppo_ratio`", False, here=("loss.disable_ppo_ratio",)
    ),
    "algorithm.rollout_correction.loss_type": report(
        "for reinforce, set `loss.disable_ppo_ratio`", "ppo_clip", here=("loss.disable_ppo_ratio",)
    ),
    "algorithm._target_": ignore("it is decided here"),
    "algorithm.use_pf_ppo": report("samples are not weighted again", False),
    "algorithm.pf_ppo.*": read_with("algorithm.use_pf_ppo"),
    "data.train_files": _convert_files("data.path"),
    "data.val_files": _convert_files("data.eval_path"),
    "data.train_batch_size": copy("algorithm.prompts_per_step", "prompts"),
    "data.max_response_length": copy("generation.max_new_tokens", "32 here by default"),
    "data.max_prompt_length": Key(
        ("model.max_sequence_length",), "prompt and completion together", _convert_prompt_length
    ),
    "data.truncation": Key(
        ("data.too_long",),
        "`truncate` cuts a prompt at its beginning",
        lambda value, settings: (
            None
            if settings.get("data.filter_overlong_prompts")
            else rename("data.too_long", {"error": "error", "left": "truncate"}).translate(value, settings)
        ),
    ),
    "data.filter_overlong_prompts": if_true({"data.too_long": "drop"}),
    "data.prompt_key": Key(
        ("data.columns",),
        "",
        lambda value, settings: None if value == "prompt" else {"data.columns": {"prompt": value}},
    ),
    "data.seed": copy("train.seed"),
    "data.shuffle": report("training data are always shuffled", True),
    "data.val_max_samples": copy("data.num_eval_examples", unused=(None, -1)),
    "data.train_max_samples": report("write the records to use to a file of their own", -1),
    "data.apply_chat_template_kwargs": copy("data.chat_template_kwargs", unused=(None, {})),
    "data.apply_chat_template_kwargs.*": report("set `data.chat_template_kwargs`", here=("data.chat_template_kwargs",)),
    "data.custom_cls.path": report("register a data source of your own: docs/extending.md"),
    "data.sampler.class_path": report("set `data.mix_weights` for a curriculum", here=("data.mix_weights",)),
    "data.tokenizer": copy("tokenizer.path"),
    "data.reward_fn_key": report("reward functions read the field `data_source`", "data_source"),
    "data.datagen.path": report("write the records to a file"),
    "data.tool_config_path": read_with(f"{_ROLLOUT}multi_turn.tool_config_path"),
    **ignore_each(
        "data.",
        "use_shm val_batch_size return_raw_input_ids return_raw_chat return_full_prompt dataloader_num_workers "
        "validation_shuffle filter_overlong_prompts_workers image_key image_patch_size video_key trust_remote_code "
        "custom_cls.name return_multi_modal_inputs sampler.class_name datagen.name",
        "files are read as they are, by one process per node",
    ),
    f"{_MODEL}path": name_model(),
    f"{_MODEL}tokenizer_path": copy("tokenizer.path"),
    f"{_MODEL}custom_chat_template": copy("data.chat_template"),
    f"{_MODEL}use_fused_kernels": copy("train.fused_head", unused=(None, False)),
    f"{_MODEL}enable_gradient_checkpointing": Key(
        ("model.recompute",),
        "of the FSDP trainer",
        lambda value, settings: (
            {"model.recompute": "full"} if value and settings.get(f"{_ACTOR}strategy") in ("fsdp", "fsdp2") else None
        ),
    ),
    f"{_MODEL}enable_activation_offload": report("set `model.recompute`", False, here=("model.recompute",)),
    f"{_MODEL}lora_rank": Key(("peft.r",), "0 is off", _convert_lora),
    f"{_MODEL}lora_alpha": _make_lora_key(f"{_MODEL}lora_rank", copy("peft.lora_alpha")),
    f"{_MODEL}target_modules": _make_lora_key(f"{_MODEL}lora_rank", copy("peft.target_modules")),
    f"{_MODEL}exclude_modules": _make_lora_key(f"{_MODEL}lora_rank", copy("peft.exclude_modules")),
    f"{_MODEL}lora.rank": Key(("peft.r",), "0 is off", _convert_lora),
    f"{_MODEL}lora.alpha": _make_lora_key(f"{_MODEL}lora.rank", copy("peft.lora_alpha")),
    f"{_MODEL}lora.dropout": _make_lora_key(f"{_MODEL}lora.rank", copy("peft.lora_dropout")),
    f"{_MODEL}lora.target_modules": _make_lora_key(
        f"{_MODEL}lora.rank",
        report("modules have their Hugging Face names, such as q_proj", here=("peft.target_modules",)),
    ),
    f"{_MODEL}lora.exclude_modules": _make_lora_key(
        f"{_MODEL}lora.rank",
        report("modules have their Hugging Face names, such as q_proj", [], here=("peft.exclude_modules",)),
    ),
    f"{_MODEL}lora.dropout_position": _make_lora_key(
        f"{_MODEL}lora.rank", report("the dropout is of the adapters' input", "pre")
    ),
    f"{_MODEL}lora.adapter_path": report(
        "import the adapter: `rl-megatron convert import ADAPTER … --base CHECKPOINT`"
    ),
    **ignore_each(
        f"{_MODEL}lora.",
        "type merge lora_A_init_method lora_B_init_method a2a_experimental dtype",
        "A starts randomly and B at 0",
    ),
    f"{_MODEL}lora_adapter_path": report(
        "import the adapter: `rl-megatron convert import ADAPTER … --base CHECKPOINT`"
    ),
    f"{_MODEL}override_config": report("set keys of `model`", {}),
    f"{_MODEL}override_config.*": report("set keys of `model`", {}, False),
    **ignore_each(
        _MODEL,
        "_target_ hf_config_path use_shm trust_remote_code external_lib use_remove_padding use_liger "
        "fused_kernel_options.impl_backend",
        "`rl-megatron convert import` reads the shape of the model",
    ),
    f"{_ACTOR}ppo_mini_batch_size": Key(
        ("train.global_batch_size",), "prompts there, and sequences here", _convert_batch
    ),
    f"{_ACTOR}ppo_micro_batch_size": report("set `train.micro_batch_size`", here=("train.micro_batch_size",)),
    f"{_ACTOR}ppo_micro_batch_size_per_gpu": Key(
        ("train.micro_batch_size",),
        "with `train.batching=padded`",
        lambda value, settings: (
            None
            if settings.get(f"{_ACTOR}use_dynamic_bsz")
            else {"train.batching": "padded", "train.micro_batch_size": value}
        ),
    ),
    f"{_ACTOR}use_dynamic_bsz": if_true({"train.batching": "packed"}, "the default here"),
    f"{_ACTOR}ppo_max_token_len_per_gpu": only_if(f"{_ACTOR}use_dynamic_bsz", True, copy("train.micro_batch_tokens")),
    f"{_ACTOR}ppo_epochs": copy("algorithm.updates_per_rollout"),
    f"{_ACTOR}clip_ratio": Key(("loss.ratio_clip_min", "loss.ratio_clip_max"), "", _convert_clip),
    f"{_ACTOR}clip_ratio_low": copy("loss.ratio_clip_min"),
    f"{_ACTOR}clip_ratio_high": copy("loss.ratio_clip_max"),
    f"{_ACTOR}clip_ratio_c": Key(
        ("loss.ratio_clip_c",),
        "3.0 there and off here by default",
        lambda value, settings: None if settings.get(_MODE) in _WITHOUT_DUAL_CLIP else {"loss.ratio_clip_c": value},
    ),
    f"{_ACTOR}loss_agg_mode": Key(("loss.token_level_loss", "loss.fixed_sequence_length"), "", _convert_average),
    f"{_ACTOR}loss_scale_factor": read_with(f"{_ACTOR}loss_agg_mode", "loss.fixed_sequence_length"),
    _MODE: Key(
        (
            "loss.sequence_level_importance_ratios",
            "loss.token_level_loss",
            "loss.use_gmpo",
            "loss.use_sapo",
            "loss.use_cispo",
            "loss.use_clip_cov",
            "loss.use_kl_cov",
        ),
        "`gspo`, `geo_mean`, `sapo`, `cispo`, `clip_cov`, `kl_cov`",
        _convert_mode,
    ),
    f"{_ACTOR}policy_loss.clip_cov_ratio": only_if(_MODE, "clip_cov", copy("loss.clip_cov_ratio")),
    f"{_ACTOR}policy_loss.clip_cov_lb": only_if(_MODE, "clip_cov", copy("loss.clip_cov_min")),
    f"{_ACTOR}policy_loss.clip_cov_ub": only_if(_MODE, "clip_cov", copy("loss.clip_cov_max")),
    f"{_ACTOR}policy_loss.kl_cov_ratio": only_if(_MODE, "kl_cov", copy("loss.kl_cov_ratio")),
    f"{_ACTOR}policy_loss.ppo_kl_coef": only_if(_MODE, "kl_cov", copy("loss.kl_cov_coef")),
    f"{_ACTOR}tau_pos": only_if(_MODE, "sapo", copy("loss.sapo_temperature_pos")),
    f"{_ACTOR}tau_neg": only_if(_MODE, "sapo", copy("loss.sapo_temperature_neg")),
    f"{_ACTOR}entropy_coeff": copy("loss.entropy_coeff"),
    f"{_ACTOR}use_kl_loss": Key(("loss.reference_policy_kl_penalty",), "0 is off", _convert_kl),
    f"{_ACTOR}kl_loss_coef": read_with(f"{_ACTOR}use_kl_loss", "loss.reference_policy_kl_penalty"),
    f"{_ACTOR}kl_loss_type": only_if(f"{_ACTOR}use_kl_loss", True, rename("loss.reference_policy_kl_type", _KL_TYPES)),
    f"{_ACTOR}grad_clip": copy("optimizer.clip_grad"),
    f"{_ACTOR}ulysses_sequence_parallel_size": copy("parallel.context", unused=(None, 1)),
    f"{_ACTOR}router_replay.mode": Key(
        ("generation.router_replay",),
        "",
        lambda value, settings: None if value == "disabled" else {"generation.router_replay": True},
    ),
    f"{_ACTOR}checkpoint.async_save": copy("train.async_save"),
    f"{_ACTOR}checkpoint.*": ignore("a checkpoint has everything; `train.export_hf` also exports it"),
    f"{_ACTOR}strategy": ignore("models always run on megatron-core"),
    f"{_ACTOR}fsdp_config.*": ignore("models always run on megatron-core; `optimizer.distributed` shards its state"),
    f"{_ACTOR}profiler.*": ignore("set `profile.steps`"),
    f"{_ACTOR}tis_imp_ratio_cap": Key(
        (
            "loss.truncated_importance_sampling_ratio",
            "loss.truncated_importance_sampling_type",
            "loss.use_importance_sampling_correction",
        ),
        "-1 is off",
        _convert_cap,
    ),
    f"{_ACTOR}policy_loss._target_": ignore("it is decided here"),
    **ignore_each(
        _ACTOR,
        "_target_ use_torch_compile shuffle entropy_from_logits_with_chunking entropy_checkpointing use_remove_padding "
        "use_fused_kernels data_loader_seed load_weight freeze_vision_tower rollout_n",
    ),
    **_list_optimizer_keys(f"{_ACTOR}optim.", "optimizer."),
    **{f"{_ACTOR}megatron.{name}": key for name, key in _LAYOUT.items()},
    "actor_rollout_ref.ref.megatron.param_offload": if_true({"train.reference": "offload"}),
    "actor_rollout_ref.ref.fsdp_config.param_offload": if_true({"train.reference": "offload"}),
    "actor_rollout_ref.ref.*": ignore("the reference uses the policy's layout and microbatches"),
    "actor_rollout_ref.nccl_timeout": compute(
        "train.collective_timeout_minutes", lambda value, settings: value / 60, "seconds there"
    ),
    "actor_rollout_ref.hybrid_engine": ignore("`generation.engine` and `generation.refit` decide it"),
    _ENGINE: rename("generation.engine", {"vllm": "vllm", "sglang": "sglang", "hf": "transformers"}),
    f"{_ROLLOUT}n": copy("algorithm.samples_per_prompt"),
    f"{_ROLLOUT}temperature": copy("generation.temperature"),
    f"{_ROLLOUT}top_p": copy("generation.top_p"),
    f"{_ROLLOUT}top_k": compute("generation.top_k", _every, "off is 0 here, -1 there"),
    f"{_ROLLOUT}tensor_model_parallel_size": _set_for_server(vllm="tensor_parallel_size", sglang="tp_size"),
    f"{_ROLLOUT}gpu_memory_utilization": _set_for_server(vllm="gpu_memory_utilization", sglang="mem_fraction_static"),
    f"{_ROLLOUT}enforce_eager": only_if(_ENGINE, "vllm", copy("generation.vllm.enforce_eager")),
    f"{_ROLLOUT}max_model_len": only_if(_ENGINE, "vllm", copy("generation.vllm.max_model_len")),
    f"{_ROLLOUT}max_num_seqs": only_if(_ENGINE, "vllm", copy("generation.vllm.max_num_seqs")),
    f"{_ROLLOUT}max_num_batched_tokens": only_if(_ENGINE, "vllm", copy("generation.vllm.max_num_batched_tokens")),
    f"{_ROLLOUT}free_cache_engine": Key(
        ("generation.refit",),
        "`shared_memory`: the servers run on the policy's GPUs",
        lambda value, settings: (
            {"generation.refit": "shared_memory"} if value and settings.get(_ENGINE) in ("vllm", "sglang") else None
        ),
    ),
    f"{_ROLLOUT}update_weights_bucket_megabytes": copy("generation.refit_bucket_mb"),
    f"{_ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes": copy("generation.refit_bucket_mb"),
    f"{_ROLLOUT}enable_rollout_routing_replay": copy("generation.router_replay", unused=(None, False)),
    f"{_ROLLOUT}val_kwargs.n": Key(("eval.sets",), "of each set", _convert_validation),
    **{
        f"{_ROLLOUT}val_kwargs.{name}": report(
            f"the evaluation on held-out data is greedy; set `{here}` of each set of `eval.sets`",
            *greedy,
            here=("eval.sets",),
        )
        for name, here, greedy in (
            ("temperature", "temperature", (0, 0.0)),
            ("do_sample", "temperature", (False,)),
            ("top_p", "top_p", (1.0,)),
            ("top_k", "top_k", (-1, 0)),
        )
    },
    f"{_ROLLOUT}val_kwargs._target_": ignore("it is decided here"),
    f"{_ROLLOUT}do_sample": report("completions of training are always sampled", True),
    f"{_ROLLOUT}multi_turn.enable": report(
        "set `rollout.worker=conversation` with `rollout.tools.functions` or `rollout.environment.name`",
        False,
        here=("rollout.worker", "rollout.tools.functions", "rollout.environment.name"),
    ),
    f"{_ROLLOUT}multi_turn.max_assistant_turns": only_if(
        f"{_ROLLOUT}multi_turn.enable", True, report("set `rollout.max_turns`", here=("rollout.max_turns",))
    ),
    f"{_ROLLOUT}multi_turn.tool_config_path": only_if(
        f"{_ROLLOUT}multi_turn.enable",
        True,
        report("name functions in `rollout.tools.functions`", here=("rollout.tools.functions",)),
    ),
    f"{_ROLLOUT}multi_turn.format": read_with(f"{_ROLLOUT}multi_turn.enable", "rollout.tools.format"),
    f"{_ROLLOUT}multi_turn.*": read_with(f"{_ROLLOUT}multi_turn.enable"),
    f"{_ROLLOUT}engine_kwargs.*": report(
        "write them as arguments in `generation.vllm.extra_args` or `generation.sglang.extra_args`",
        here=("generation.vllm.extra_args", "generation.sglang.extra_args"),
    ),
    f"{_ROLLOUT}quantization": report("the engine has the policy's precision", False),
    f"{_ROLLOUT}ignore_eos": report("a completion ends with the end token", False),
    f"{_ROLLOUT}repetition_penalty": report("tokens are sampled from the policy's own distribution", 1.0),
    f"{_ROLLOUT}over_sample_rate": report("every completion is waited for", 0, 0.0),
    f"{_ROLLOUT}skip_rollout": report("completions are always sampled", False),
    **{
        f"{_ROLLOUT}{name}": report(
            "write it as an argument in `generation.vllm.extra_args`", 1, here=("generation.vllm.extra_args",)
        )
        for name in ("data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size")
    },
    f"{_ROLLOUT}agent.agent_loop_config_path": report(
        "set `rollout.worker` to your function", here=("rollout.worker",)
    ),
    f"{_ROLLOUT}agent.default_agent_loop": report(
        "set `rollout.worker`", "single_turn_agent", here=("rollout.worker",)
    ),
    f"{_ROLLOUT}agent.num_workers": ignore("workers are threads"),
    f"{_ROLLOUT}agent._target_": ignore("it is decided here"),
    **{
        f"{_ROLLOUT}{section}.*": ignore("it changes no result")
        for section in ("trace", "profiler", "prometheus", "layer_name_map", "agent.custom_async_server")
    },
    **ignore_each(
        _ROLLOUT,
        "_target_ mode prompt_length response_length dtype cudagraph_capture_sizes enable_chunked_prefill "
        "enable_prefix_caching load_format log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu disable_log_stats multi_stage_wake_up "
        "calculate_log_probs skip_dump_dir skip_tokenizer_init use_block_quant_rollout layered_summon",
    ),
    "custom_reward_function.path": Key(
        ("reward.functions",), "functions written for verl run as they are", _convert_reward
    ),
    "custom_reward_function.name": read_with("custom_reward_function.path", "reward.functions"),
    "custom_reward_function.reward_kwargs.*": report("write them as `kwargs` of the function in `reward.functions`"),
    "reward_model.enable": report(
        "add {name: reward_model, kwargs: {hf: DIRECTORY}} to `reward.functions`", False, here=("reward.functions",)
    ),
    "reward_model.reward_manager": report(
        "rewards are functions; the reward function `overlong` has the penalty of `dapo`",
        "naive",
        "batch",
        "prime",
        here=("reward.functions",),
    ),
    "reward_model.model.path": read_with("reward_model.enable", "reward.functions"),
    **{
        f"reward_model.{section}.*": report(
            "the reward function `overlong` has the penalty of `dapo`", False, here=("reward.functions",)
        )
        for section in ("overlong_buffer", "reward_kwargs")
    },
    "reward_model.sandbox_fusion.url": report("call the sandbox in your reward function"),
    "reward_manager.name": report("rewards are functions", "naive", here=("reward.functions",)),
    "reward_manager.source": report("rewards are functions", "register", here=("reward.functions",)),
    **{
        f"reward_model.{section}.*": ignore("a reward model uses the policy's layout")
        for section in ("model", "megatron", "profiler", "sandbox_fusion")
    },
    **ignore_each(
        "reward_model.",
        "_target_ strategy enable_resource_pool n_gpus_per_node nnodes micro_batch_size micro_batch_size_per_gpu "
        "max_length use_dynamic_bsz forward_max_token_len_per_gpu launch_reward_fn_async "
        "ulysses_sequence_parallel_size nccl_timeout load_weight",
        "a reward model uses the policy's layout",
    ),
    **_list_optimizer_keys("critic.optim.", "algorithm.critic_optimizer."),
    "critic.cliprange_value": copy("algorithm.value_clip"),
    "critic.model.path": Key(
        (),
        "the critic starts from the policy's weights",
        lambda value, settings: (
            None if value == settings.get(f"{_MODEL}path") else "the critic starts from the policy's weights"
        ),
    ),
    "critic.ppo_mini_batch_size": ignore("the critic learns from the policy's batches"),
    "critic.ppo_epochs": Key(
        (),
        "the critic learns in the policy's epochs",
        lambda value, settings: (
            None if value == settings.get(f"{_ACTOR}ppo_epochs", 1) else "the critic learns in the policy's epochs"
        ),
    ),
    "critic.grad_clip": copy("algorithm.critic_optimizer.clip_grad"),
    "critic.loss_agg_mode": report("the critic's loss is averaged over all tokens", "token-mean"),
    "critic.model.lora_rank": report("the critic has the adapters of `peft`", 0, here=("peft.r",)),
    **{
        f"critic.{section}.*": ignore("the critic uses the policy's layout and microbatches")
        for section in ("megatron", "model", "checkpoint", "profiler")
    },
    **ignore_each(
        "critic.",
        "_target_ rollout_n strategy enable ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz "
        "ppo_max_token_len_per_gpu forward_max_token_len_per_gpu forward_micro_batch_size "
        "forward_micro_batch_size_per_gpu shuffle ulysses_sequence_parallel_size nccl_timeout load_weight "
        "data_loader_seed",
        "the critic uses the policy's layout and microbatches",
    ),
    "trainer.total_training_steps": copy("train.steps", "rollout steps"),
    "trainer.total_epochs": Key(
        ("train.steps",),
        "`train.steps` counts rollout steps",
        lambda value, settings: (
            "set train.steps: epochs · prompts / data.train_batch_size"
            if settings.get("trainer.total_training_steps") is None
            else None
        ),
    ),
    "trainer.test_freq": compute("train.eval_every", _every, "0 here is -1 there"),
    "trainer.save_freq": compute("train.save_every", _every, "0 here is -1 there"),
    "trainer.val_before_train": ignore("the first evaluation always happens"),
    "trainer.critic_warmup": only_if(_ESTIMATOR, "gae", copy("algorithm.critic_warmup_steps")),
    "trainer.default_local_dir": copy("output_dir"),
    "trainer.max_actor_ckpt_to_keep": keep_checkpoints("`null` keeps all"),
    "trainer.val_only": report("evaluate a checkpoint by `rl-megatron eval`", False),
    "trainer.resume_mode": rename("resume", {"auto": True, "disable": False}),
    "trainer.resume_from_path": report("set `init_from` to a checkpoint", here=("init_from",)),
    "trainer.logger": Key(("logger.wandb", "logger.mlflow", "logger.swanlab"), "several at once", _convert_loggers),
    "trainer.project_name": read_with("trainer.logger", "logger.wandb.project"),
    "trainer.experiment_name": read_with("trainer.logger", "logger.wandb.name"),
    "trainer.rollout_data_dir": Key(
        ("rollout.save_every",), "files in `output_dir`", lambda value, settings: {"rollout.save_every": 1}
    ),
    "trainer.log_val_generations": report(
        "set `rollout.save_every`; `rl-megatron rollouts` shows them", 0, here=("rollout.save_every",)
    ),
    "trainer.n_gpus_per_node": report("start the run by `torchrun --nproc-per-node N -m rl_megatron train`"),
    "trainer.nnodes": report("start the run by `torchrun --nnodes N`, or by scripts/train.slurm", 1),
    "trainer.device": ignore("`device=auto` finds a GPU"),
    "trainer.balance_batch": ignore("tokens are balanced over the ranks"),
    **ignore_each(
        "trainer.",
        "validation_data_dir esi_redundant_time default_hdfs_dir del_local_ckpt_after_load max_critic_ckpt_to_keep "
        "ray_wait_register_center_timeout use_legacy_worker_impl",
        "there is no controller process",
    ),
    "global_profiler.steps": copy("profile.steps"),
    "global_profiler.*": ignore("set `profile.steps`"),
    "defaults": report(
        "included files are not read: write the whole configuration to a file by adding --cfg job to verl's command"
    ),
    "hydra.*": ignore("`output_dir` is the directory of the run"),
    "ray_kwargs.*": ignore("there is no Ray"),
    "ray_init.*": ignore("there is no Ray"),
    "transfer_queue.*": ignore("there is no controller process"),
}

DEFAULTS: dict[str, Any] = {
    _ESTIMATOR: "gae",
    "algorithm.kl_penalty": "kl",
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_ACTOR}ppo_mini_batch_size": 256,
    f"{_ACTOR}clip_ratio_c": 3.0,
    f"{_ACTOR}policy_loss.ppo_kl_coef": 0.1,
    f"{_ACTOR}use_kl_loss": False,
    f"{_ACTOR}optim.lr": 1e-6,
    f"{_ACTOR}optim.lr_decay_style": "constant",
    f"{_ACTOR}optim.betas": [0.9, 0.999],
    f"{_ACTOR}megatron.dtype": "bfloat16",
    f"{_MODEL}lora_alpha": 16,
    f"{_MODEL}lora.alpha": 32,
    f"{_ROLLOUT}n": 1,
    "critic.optim.lr": 1e-5,
    "critic.optim.lr_decay_style": "constant",
    "critic.optim.betas": [0.9, 0.999],
    "critic.cliprange_value": 0.5,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.total_epochs": 30,
}


def _find_unread(settings: Settings) -> dict[str, str]:
    unread = {} if settings.get(_ESTIMATOR) == "gae" else {"critic.": f"{_ESTIMATOR} is not gae"}
    if not settings.get("reward_model.enable"):
        unread["reward_model.model."] = "reward_model.enable is not true"
    return unread


LIBRARY = Library("verl", KEYS, DEFAULTS, find_unread=_find_unread)

"""The keys of NeMo RL's configuration files (0.8), such as examples/configs/grpo_math_1B.yaml."""

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
    report_epochs,
)

_PAIRS = ("dpo", "rm")  # the sections whose batch sizes count pairs
_MEGATRON = "policy.megatron_cfg.enabled"
_ESTIMATOR = "grpo.adv_estimator.name"
_ENVIRONMENT_NAMES = ("data.default.env_name", "data.train.env_name", "data.env_name")
_MATH_REWARD = {"reward.functions": [{"name": "math_verify"}]}
_ESTIMATORS = {
    "grpo": "group_relative",
    "gdpo": "group_decoupled",
    "reinforce_plus_plus": "reinforce_plus_plus_baseline",
}
_PRECISIONS = {"bfloat16": "bf16", "float32": "fp32"}
_OWN_DATA_SETS = {
    "ResponseDataset": {},  # data_path names its file
    "OpenMathInstruct-2": {
        "data.dataset_name": "nvidia/OpenMathInstruct-2",
        "data.columns": {"prompt": "problem", "answer": "expected_answer"},
    },
}


def _sequences(value: Any, settings: Settings) -> object:
    """Return a batch size in sequences; those of `_PAIRS` count pairs."""
    is_pairs = any(key.partition(".")[0] in _PAIRS for key in settings)
    return value * 2 if is_pairs and isinstance(value, int) else value


def _convert_new_tokens(value: Any, settings: Settings) -> Converted:
    """Return limits that leave a prompt its place.

    NeMo RL usually sets the limit of new tokens to that of a sequence, and its engine stops at the latter.
    """
    longest = settings.get("policy.max_total_sequence_length")
    here = {"generation.max_new_tokens": value}
    if isinstance(longest, int) and isinstance(value, int) and value >= longest:
        return here | {"rollout.max_tokens": longest, "model.max_sequence_length": longest + value}
    return here


def _convert_total_length(value: Any, settings: Settings) -> Converted:
    new = settings.get("policy.generation.max_new_tokens")
    is_set_with_new = isinstance(new, int) and isinstance(value, int) and new >= value
    return None if is_set_with_new else {"model.max_sequence_length": value}


def _convert_input_length(value: Any, settings: Settings) -> Converted:
    """Return that long prompts are dropped, and report the limit unless it is the one that follows from other keys."""
    total, new = settings.get("policy.max_total_sequence_length"), settings.get("policy.generation.max_new_tokens") or 0
    if total is None:
        return "set model.max_sequence_length to it and generation.max_new_tokens together, and data.too_long=drop"
    limit = total if new >= total else total - new
    note = f"longer prompts are dropped there, and here those of more than {limit} tokens, for which there is no space"
    return {"data.too_long": "drop"} if value == limit else ({"data.too_long": "drop"}, note)


def _convert_advantage(here: str) -> Key:
    """Return a key of advantages relative to a group, which other estimators do not read."""
    note = (
        "NeMo RL also leaves a sample out of the standard deviation that its advantage uses; here it is left out of "
        "the mean only"
    )

    def convert(value: Any, settings: Settings) -> Converted:
        if settings.get(_ESTIMATOR, "grpo") != "grpo":
            return None
        return ({here: value}, note) if value and here == "algorithm.leave_one_out" else {here: value}

    return Key((here,), "", convert)


def _convert_estimator(value: Any, settings: Settings) -> Converted:
    if value == "reinforce_plus_plus" and settings.get("grpo.adv_estimator.minus_baseline") is False:
        return {"algorithm.advantage_estimator": "reinforce_plus_plus"}
    return rename("algorithm.advantage_estimator", _ESTIMATORS).translate(value, settings)


def _convert_shaping(value: Any, settings: Settings) -> Converted:
    if not value:
        return None
    kwargs = {
        "max_tokens": settings.get("grpo.reward_shaping.max_response_length"),
        "buffer_tokens": settings.get("grpo.reward_shaping.overlong_buffer_length"),
    }
    weight = settings.get("grpo.reward_shaping.overlong_buffer_penalty", 1)
    return {"reward.functions": [{"name": "overlong", "weight": weight, "kwargs": kwargs}]}


def _convert_truncation(value: Any, settings: Settings) -> Converted:
    if not settings.get("loss_fn.use_importance_sampling_correction"):
        return None
    return {
        "loss.truncated_importance_sampling_type": settings.get("loss_fn.truncated_importance_sampling_type") or "tis",
        "loss.truncated_importance_sampling_ratio": value,
    }


def _convert_scheduler(value: Any, settings: Settings) -> Converted:
    """Return the warmup and the decay of a list of torch's schedulers, if it is a warmup and then a constant."""
    if value is None:
        return {"optimizer.decay_style": "constant"}
    stages = [stage for stage in value if "name" in stage] if isinstance(value, list) else []
    names = [str(stage["name"]).rpartition(".")[2] for stage in stages]
    kwargs = {name: stage.get("kwargs", {}) for name, stage in zip(names, stages, strict=True)}
    warmup = kwargs.get("LinearLR", {"total_iters": 0})
    is_known = (
        names in (["LinearLR", "ConstantLR"], ["LinearLR"], ["ConstantLR"])
        and warmup.get("end_factor", 1.0) == 1.0
        and kwargs.get("ConstantLR", {"factor": 1.0}).get("factor") == 1.0
        and all(stage["milestones"] == [warmup["total_iters"]] for stage in value if "milestones" in stage)
    )
    if not is_known:
        return "set optimizer.warmup_steps and optimizer.decay_style: constant, linear, cosine or inverse-square-root"
    here = {"optimizer.decay_style": "constant", "optimizer.warmup_steps": warmup["total_iters"]}
    start = warmup.get("start_factor", 1 / 3) if warmup["total_iters"] else 0
    return (here, f"the warmup begins at {start:g} of the learning rate there, and at 0 here") if start else here


def _convert_betas(value: Any, settings: Settings) -> Converted:
    return {"optimizer.beta1": value[0], "optimizer.beta2": value[1]}


def _convert_best(value: Any, settings: Settings) -> Converted:
    name = str(value).removeprefix("val:").removeprefix("val_")
    section = next((section for section in SECTIONS if settings.get(section)), "grpo")
    saved, evaluated = settings.get("checkpointing.save_period"), settings.get(f"{section}.val_period")
    if not evaluated or not saved or saved % evaluated:
        return "train.keep_best needs a train.save_every that is a multiple of train.eval_every; set all three"
    if name in ("accuracy", "reward"):
        return {"train.keep_best": "reward"}
    return "set train.keep_best to an eval metric: reward, nll_per_token, preference_accuracy, …"


def _convert_logger(name: str, *keys: str) -> Key:
    """Return the switch of a service, whose keys are in a section of its name."""

    def convert(value: Any, settings: Settings) -> Converted:
        arguments = {key: settings[f"logger.{name}.{key}"] for key in keys if settings.get(f"logger.{name}.{key}")}
        return {f"logger.{name}": arguments} if value else None

    return Key((f"logger.{name}",), "", convert)


def _convert_data_set(value: Any, settings: Settings) -> Converted:
    if value in _OWN_DATA_SETS:
        return _OWN_DATA_SETS[value] or None
    if "/" in str(value):
        return {"data.dataset_name": value}
    return f"{value} is a name of NeMo RL's own: set data.dataset_name to the data set of the Hub, or data.path"


def _column(name: str) -> Key:
    """Return a key that names the field of a record that has the prompt or the answer."""

    def convert(value: Any, settings: Settings) -> Converted:
        return None if value == name else {"data.columns": {name: value}}

    return Key(("data.columns",), "", convert)


def _convert_environment(value: Any, settings: Settings) -> Converted:
    if value == "math":
        return _MATH_REWARD
    return (
        "set reward.functions, or rollout.worker=conversation with rollout.environment.name: the class of your "
        "environment runs as it is"
    )


def _convert_math(value: Any, settings: Settings) -> Converted:
    """Return the number of workers of the environment `math`, which gives the rewards if no `env_name` is set."""
    workers = {"reward.num_workers": value} if isinstance(value, int) else {}
    return workers if any(settings.get(name) for name in _ENVIRONMENT_NAMES) else workers | _MATH_REWARD


_BACKENDS = {"vllm": "vllm", "sglang": "sglang", "megatron": "embedded"}
_VLLM = "policy.generation.backend", "vllm"
_TURNS = "set `rollout.worker=conversation`, `rollout.environment.name` and `rollout.max_turns`"
_PROMPT_FILE = "it is a text here, not a file: {} in the file is {prompt} here"
_LOSS_KEYS = (
    "ratio_clip_min ratio_clip_max ratio_clip_c disable_ppo_ratio force_on_policy_ratio token_level_loss "
    "sequence_level_importance_ratios reference_policy_kl_penalty reference_policy_kl_type use_kl_in_reward "
    "use_importance_sampling_correction use_on_policy_kl_approximation use_cispo positive_example_nll_weight "
    "kl_type mixed_kl_weight zero_outside_topk"
).split()
_DPO_KEYS = (
    "reference_policy_kl_penalty preference_loss_weight sft_loss_weight preference_average_log_probs "
    "sft_average_log_probs"
).split()
SECTIONS = {
    "grpo": {"algorithm": "grpo"},
    "dpo": {"algorithm": "dpo", "loss": "dpo"},
    "sft": {"algorithm": "sft"},
    "rm": {"algorithm": "reward_model", "loss": "preference"},
    "distillation": {"algorithm": "on_policy_distillation", "loss": "distillation"},
}


def _list_common_keys(section: str) -> dict[str, Key]:
    """Return the rows of keys that the sections of all algorithms have."""
    return {
        f"{section}": Key(tuple(SECTIONS[section]), "", lambda value, settings: SECTIONS[section]),
        f"{section}.max_num_steps": copy("train.steps"),
        f"{section}.max_num_epochs": report_epochs(),
        f"{section}.val_period": copy("train.eval_every"),
        f"{section}.val_at_start": ignore("the first evaluation, before the first step, always happens"),
        f"{section}.val_at_end": ignore("the last evaluation always happens"),
        f"{section}.val_batch_size": ignore("an evaluation uses the batches of training"),
        f"{section}.val_global_batch_size": ignore("an evaluation uses the batches of training"),
        f"{section}.val_micro_batch_size": ignore("an evaluation uses the microbatches of training"),
        f"{section}.val_batches": report(
            "set `data.num_eval_examples`, in sequences", here=("data.num_eval_examples",)
        ),
        f"{section}.max_val_samples": copy("data.num_eval_examples"),
        f"{section}.seed": copy("train.seed"),
    }


def _make_dropout_key(section: str) -> Key:
    """Return the key of the place of a dropout, which has an effect if there is one."""

    def convert(value: Any, settings: Settings) -> Converted:
        has_dropout = settings.get(f"{section}enabled") and settings.get(f"{section}dropout")
        return "the dropout is of the adapters' input" if has_dropout else None

    return Key((), "the dropout is of the adapters' input", convert, (None, "pre"))


def _list_megatron_keys() -> dict[str, Key]:
    prefix = "policy.megatron_cfg."
    keys = {
        "tensor_model_parallel_size": copy("parallel.tensor"),
        "pipeline_model_parallel_size": copy("parallel.pipeline"),
        "context_parallel_size": copy("parallel.context", "without packing too"),
        "expert_model_parallel_size": copy("parallel.expert"),
        "expert_tensor_parallel_size": copy("parallel.expert_tensor"),
        "num_layers_in_first_pipeline_stage": copy("parallel.first_stage_layers"),
        "num_layers_in_last_pipeline_stage": copy("parallel.last_stage_layers"),
        "sequence_parallel": copy("parallel.sequence"),
        "activation_checkpointing": if_true({"model.recompute": "full"}),
        "moe_router_bias_update_rate": copy("model.router_bias_update", unused=(None, 0.0)),
        "moe_router_load_balancing_type": report(
            "set `model.router_aux_loss`", "none", here=("model.router_aux_loss",)
        ),
        "freeze_moe_router": report("the router is trained", False),
        "optimizer.optimizer": report("the optimizer is always Adam with decoupled weight decay", "adam"),
        "optimizer.lr": copy("optimizer.lr", "the default here, 1e-3, is for tiny models"),
        "optimizer.min_lr": copy("optimizer.min_lr"),
        "optimizer.weight_decay": copy("optimizer.weight_decay"),
        "optimizer.adam_beta1": copy("optimizer.beta1"),
        "optimizer.adam_beta2": copy("optimizer.beta2"),
        "optimizer.adam_eps": copy("optimizer.epsilon"),
        "optimizer.clip_grad": copy("optimizer.clip_grad"),
        "optimizer.use_distributed_optimizer": copy("optimizer.distributed"),
        "optimizer.optimizer_cpu_offload": report("the optimizer stays on the device", False),
        **ignore_each(
            "optimizer.",
            "bf16 fp16 params_dtype sgd_momentum use_precision_aware_optimizer optimizer_offload_fraction",
            "`precision` decides which dtypes the optimizer uses",
        ),
        "scheduler.lr_decay_style": copy("optimizer.decay_style"),
        "scheduler.lr_decay_iters": copy("optimizer.decay_steps"),
        "scheduler.lr_warmup_iters": copy("optimizer.warmup_steps"),
        "scheduler.lr_warmup_init": report("the warmup begins at 0", 0, 0.0),
        "scheduler.weight_decay_incr_style": report("the weight decay is constant", "constant"),
        **ignore_each("scheduler.", "start_weight_decay end_weight_decay", "the weight decay is constant"),
        "distributed_data_parallel_config.overlap_grad_reduce": copy("optimizer.overlap"),
        "distributed_data_parallel_config.use_custom_fsdp": report(
            "weights are not sharded over data-parallel ranks; `optimizer.distributed` shards the optimizer state",
            False,
        ),
        **ignore_each(
            "distributed_data_parallel_config.",
            "grad_reduce_in_fp32 overlap_param_gather average_in_collective data_parallel_sharding_strategy",
            "`optimizer.overlap` decides this too",
        ),
        "fp8_cfg": report("there is no FP8; set `precision=bf16`"),
        "fp8_cfg.enabled": report("there is no FP8; set `precision=bf16`", False),
        "fp8_cfg.*": read_with("fp8_cfg.enabled"),
        "peft.enabled": read_with("policy.megatron_cfg.peft.dim"),
        "peft.dim": only_if(f"{prefix}peft.enabled", True, copy("peft.r")),
        "peft.alpha": only_if(f"{prefix}peft.enabled", True, copy("peft.lora_alpha")),
        "peft.dropout": only_if(f"{prefix}peft.enabled", True, copy("peft.lora_dropout")),
        "peft.target_modules": only_if(
            f"{prefix}peft.enabled",
            True,
            report("modules have their Hugging Face names, such as q_proj", [], here=("peft.target_modules",)),
        ),
        "peft.exclude_modules": only_if(
            f"{prefix}peft.enabled",
            True,
            report("modules have their Hugging Face names, such as q_proj", [], here=("peft.exclude_modules",)),
        ),
        "peft.dropout_position": _make_dropout_key(f"{prefix}peft."),
        **ignore_each(
            "peft.",
            "type lora_A_init_method lora_B_init_method a2a_experimental lora_dtype",
            "A starts randomly and B at 0",
        ),
        "enabled": ignore("models always run on megatron-core"),
        "converter_type": ignore("`rl-megatron convert import` recognises the model"),
        "env_vars": report("set environment variables before the command"),
        "env_vars.*": report("set environment variables before the command"),
        **ignore_each(
            "",
            "empty_unused_memory_level pipeline_dtype moe_router_dtype moe_permute_fusion apply_rope_fusion "
            "bias_activation_fusion defer_fp32_logits moe_per_layer_logging moe_enable_deepep "
            "moe_token_dispatcher_type moe_shared_expert_overlap force_reconvert_from_hf track_moe_metrics",
        ),
    }
    return {f"{prefix}{name}": key for name, key in keys.items()}


def _list_dtensor_keys() -> dict[str, Key]:
    keys = {
        "tensor_parallel_size": copy("parallel.tensor"),
        "context_parallel_size": copy("parallel.context"),
        "expert_parallel_size": copy("parallel.expert"),
        "sequence_parallel": copy("parallel.sequence"),
        "activation_checkpointing": if_true({"model.recompute": "full"}),
        "cpu_offload": report("weights and the optimizer stay on the device", False),
        "lora_cfg.enabled": read_with("policy.dtensor_cfg.lora_cfg.dim"),
        "lora_cfg.dim": only_if("policy.dtensor_cfg.lora_cfg.enabled", True, copy("peft.r")),
        "lora_cfg.alpha": only_if("policy.dtensor_cfg.lora_cfg.enabled", True, copy("peft.lora_alpha")),
        "lora_cfg.dropout": only_if("policy.dtensor_cfg.lora_cfg.enabled", True, copy("peft.lora_dropout")),
        "lora_cfg.target_modules": only_if(
            "policy.dtensor_cfg.lora_cfg.enabled", True, copy("peft.target_modules", unused=(None, []))
        ),
        "lora_cfg.exclude_modules": only_if(
            "policy.dtensor_cfg.lora_cfg.enabled", True, copy("peft.exclude_modules", unused=(None, []))
        ),
        "lora_cfg.dropout_position": _make_dropout_key("policy.dtensor_cfg.lora_cfg."),
        **ignore_each("lora_cfg.", "match_all_linear lora_A_init use_triton", "A starts randomly and B at 0"),
        **ignore_each(
            "", "_v2 enabled custom_parallel_plan clear_cache_every_n_steps", "models always run on megatron-core"
        ),
    }
    return {f"policy.dtensor_cfg.{name}": key for name, key in keys.items()}


KEYS: dict[str, Key] = {
    **{name: key for section in SECTIONS for name, key in _list_common_keys(section).items()},
    "grpo.num_prompts_per_step": copy("algorithm.prompts_per_step"),
    "grpo.num_generations_per_prompt": copy("algorithm.samples_per_prompt"),
    _ESTIMATOR: Key(("algorithm.advantage_estimator",), "", _convert_estimator),
    "grpo.adv_estimator.normalize_rewards": _convert_advantage("algorithm.normalize_std"),
    "grpo.adv_estimator.use_leave_one_out_baseline": _convert_advantage("algorithm.leave_one_out"),
    "grpo.adv_estimator.minus_baseline": read_with(_ESTIMATOR, "algorithm.advantage_estimator"),
    "grpo.normalize_rewards": _convert_advantage("algorithm.normalize_std"),
    "grpo.use_leave_one_out_baseline": _convert_advantage("algorithm.leave_one_out"),
    "grpo.use_dynamic_sampling": copy("algorithm.dynamic_sampling"),
    "grpo.dynamic_sampling_max_gen_batches": only_if(
        "grpo.use_dynamic_sampling", True, copy("algorithm.dynamic_sampling_max_rounds")
    ),
    "grpo.batch_multiplier": report("every round of sampling has `algorithm.prompts_per_step` prompts", 1, 1.0),
    "grpo.max_rollout_turns": report(_TURNS, 1, here=("rollout.max_turns",)),
    "grpo.overlong_filtering": report(
        "no completion is left out because it was cut off; the reward function `overlong` lowers its reward",
        False,
        here=("reward.functions",),
    ),
    "grpo.reward_shaping.enabled": Key(("reward.functions",), "the reward function `overlong`", _convert_shaping),
    "grpo.reward_shaping.*": read_with("grpo.reward_shaping.enabled", "reward.functions"),
    "grpo.reward_scaling.enabled": report("scale the rewards in your reward function", False),
    "grpo.reward_scaling.*": read_with("grpo.reward_scaling.enabled"),
    "grpo.async_grpo.enabled": copy("rollout.async_enabled"),
    "grpo.async_grpo.max_trajectory_age_steps": only_if(
        "grpo.async_grpo.enabled", True, copy("rollout.max_trajectory_age_steps")
    ),
    "grpo.async_grpo.in_flight_weight_updates": only_if(
        "grpo.async_grpo.enabled", True, copy("rollout.in_flight_weight_updates")
    ),
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": Key(
        ("rollout.recompute_kv_cache_after_weight_updates",),
        "every engine recomputes it",
        lambda value, settings: None,
    ),
    "grpo.val_num_generations_per_prompt": report("set `n` of each set of `eval.sets`", 1, here=("eval.sets",)),
    "grpo.stop_at_validation_*": report("set `train.stop_at`, as in {reward: 0.9}", here=("train.stop_at",)),
    "distillation.num_prompts_per_step": copy("algorithm.prompts_per_step"),
    "distillation.num_generations_per_prompt": copy("algorithm.samples_per_prompt"),
    "distillation.topk_logits_k": copy("algorithm.top_k"),
    "distillation.max_rollout_turns": report(_TURNS, 1, here=("rollout.max_turns",)),
    "teacher.model_name": report(
        "name the imported teacher in `algorithm.teachers`, as in [{init_from: checkpoints/teacher}]",
        here=("algorithm.teachers",),
    ),
    "teacher.*": ignore("the teacher uses the policy's layout"),
    **{f"dpo.{name}": copy(f"loss.{name}") for name in _DPO_KEYS},
    **{f"loss_fn.{name}": copy(f"loss.{name}") for name in _LOSS_KEYS},
    "loss_fn.kl_input_clamp_value": copy("loss.kl_input_clamp_value", unused=()),
    "loss_fn.kl_output_clamp_value": copy("loss.kl_output_clamp_value", unused=()),
    "loss_fn.truncated_importance_sampling_ratio": Key(
        ("loss.truncated_importance_sampling_ratio", "loss.truncated_importance_sampling_type"), "", _convert_truncation
    ),
    "loss_fn.truncated_importance_sampling_ratio_min": only_if(
        "loss_fn.use_importance_sampling_correction", True, copy("loss.truncated_importance_sampling_ratio_min")
    ),
    "loss_fn.truncated_importance_sampling_type": read_with(
        "loss_fn.truncated_importance_sampling_ratio", "loss.truncated_importance_sampling_type"
    ),
    "policy.model_name": name_model(),
    "policy.tokenizer.name": Key(
        ("tokenizer.path",),
        "a directory; the tokenizer that was imported with the model is the default",
        lambda value, settings: None if value == settings.get("policy.model_name") else {"tokenizer.path": value},
    ),
    "policy.tokenizer.chat_template": copy("data.chat_template", "a Jinja file, or the template", ("default", None)),
    "policy.tokenizer.chat_template_kwargs": copy("data.chat_template_kwargs"),
    "policy.hf_config_overrides": report("set keys of `model`", {}),
    "policy.train_global_batch_size": compute("train.global_batch_size", _sequences, "sequences: a pair is two"),
    "policy.train_micro_batch_size": Key(
        ("train.micro_batch_size",),
        "with `train.batching=padded` only; sequences: a pair is two",
        lambda value, settings: (
            None
            if settings.get("policy.sequence_packing.enabled") or settings.get("policy.dynamic_batching.enabled")
            else {"train.batching": "padded", "train.micro_batch_size": _sequences(value, settings)}
        ),
    ),
    "policy.logprob_batch_size": ignore("microbatches of training and of logprobs have the same size"),
    "policy.logprob_chunk_size": Key(
        ("train.fused_head",), "logits are computed in blocks", lambda value, settings: {"train.fused_head": True}
    ),
    "policy.generation_batch_size": only_if(
        "policy.generation.backend", "megatron", copy("generation.batch_size", "of the embedded engine")
    ),
    "policy.max_total_sequence_length": Key(
        ("model.max_sequence_length",), "prompt and completion together", _convert_total_length
    ),
    "policy.precision": rename("precision", _PRECISIONS),
    "policy.max_grad_norm": copy("optimizer.clip_grad"),
    "policy.make_sequence_length_divisible_by": ignore("sequences are padded as the layout needs"),
    "policy.offload_optimizer_for_logprob": report("the optimizer stays on the device", False),
    "policy.refit_buffer_size_gb": compute("generation.refit_bucket_mb", lambda value, settings: value * 1024),
    "policy.sequence_packing.enabled": if_true({"train.batching": "packed"}, "for every loss and layout"),
    "policy.sequence_packing.train_mb_tokens": only_if(
        "policy.sequence_packing.enabled", True, copy("train.micro_batch_tokens")
    ),
    **ignore_each(
        "policy.sequence_packing.",
        "logprob_mb_tokens algorithm sequence_length_round sequence_length_pad_multiple",
        "sequences are packed as the layout needs",
    ),
    "policy.dynamic_batching.enabled": if_true({"train.batching": "dynamic"}),
    "policy.dynamic_batching.train_mb_tokens": only_if(
        "policy.dynamic_batching.enabled", True, copy("train.micro_batch_tokens")
    ),
    **ignore_each(
        "policy.dynamic_batching.", "logprob_mb_tokens sequence_length_round", "lengths are rounded as the layout needs"
    ),
    "policy.optimizer.name": report(
        "the optimizer is always Adam with decoupled weight decay", "torch.optim.AdamW", "torch.optim.adamw.AdamW"
    ),
    "policy.optimizer.kwargs.lr": copy("optimizer.lr", "the default here, 1e-3, is for tiny models"),
    "policy.optimizer.kwargs.weight_decay": copy("optimizer.weight_decay"),
    "policy.optimizer.kwargs.betas": Key(("optimizer.beta1", "optimizer.beta2"), "", _convert_betas),
    "policy.optimizer.kwargs.eps": copy("optimizer.epsilon"),
    **ignore_each("policy.optimizer.kwargs.", "foreach fused"),
    "policy.scheduler": Key(("optimizer.warmup_steps", "optimizer.decay_style"), "", _convert_scheduler, ()),
    "policy.scheduler.*": report("set `optimizer.warmup_steps` and `optimizer.decay_style`"),
    **_list_dtensor_keys(),
    **_list_megatron_keys(),
    "policy.generation.backend": rename("generation.engine", _BACKENDS, "`embedded`: the policy itself generates"),
    "policy.generation.max_new_tokens": Key(
        ("generation.max_new_tokens", "rollout.max_tokens", "model.max_sequence_length"),
        "32 here by default; prompt and completion together fit `model.max_sequence_length`",
        _convert_new_tokens,
    ),
    "policy.generation.temperature": copy("generation.temperature"),
    "policy.generation.top_p": copy("generation.top_p"),
    "policy.generation.top_k": copy("generation.top_k", "0 is off", (None, -1)),
    "policy.generation.val_temperature": report("set `temperature` of each set of `eval.sets`", here=("eval.sets",)),
    "policy.generation.stop_token_ids": report(
        "set `generation.stop_tokens` to the texts of the tokens", [], here=("generation.stop_tokens",)
    ),
    "policy.generation.stop_strings": copy("generation.stop_strings", unused=(None, [])),
    "policy.generation.colocated.enabled": Key(
        ("generation.refit",),
        "`shared_memory`: the servers run on the policy's GPUs",
        lambda value, settings: (
            {"generation.refit": "shared_memory"}
            if value and settings.get("policy.generation.backend") in ("vllm", "sglang")
            else None
        ),
    ),
    "policy.generation.colocated.resources.*": report(
        "start servers on other nodes by `rl-megatron serve`, and name them in `generation.vllm.server_nodes`",
        here=("generation.vllm.server_nodes",),
    ),
    "policy.generation.vllm_cfg.tensor_parallel_size": only_if(*_VLLM, copy("generation.vllm.tensor_parallel_size")),
    "policy.generation.vllm_cfg.gpu_memory_utilization": only_if(
        *_VLLM, copy("generation.vllm.gpu_memory_utilization")
    ),
    "policy.generation.vllm_cfg.max_model_len": only_if(*_VLLM, copy("generation.vllm.max_model_len")),
    "policy.generation.vllm_cfg.enforce_eager": only_if(*_VLLM, copy("generation.vllm.enforce_eager")),
    "policy.generation.vllm_cfg.pipeline_parallel_size": report(
        "add --pipeline-parallel-size to `generation.vllm.extra_args`", 1, here=("generation.vllm.extra_args",)
    ),
    "policy.generation.vllm_cfg.expert_parallel_size": report(
        "add --enable-expert-parallel to `generation.vllm.extra_args`", 1, here=("generation.vllm.extra_args",)
    ),
    "policy.generation.vllm_cfg.kv_cache_dtype": report(
        "add --kv-cache-dtype to `generation.vllm.extra_args`", "auto", here=("generation.vllm.extra_args",)
    ),
    "policy.generation.vllm_cfg.precision": rename(
        "precision", dict.fromkeys(_PRECISIONS), "the engine has the policy's precision"
    ),
    **ignore_each(
        "policy.generation.vllm_cfg.",
        "async_engine use_deep_gemm num_last_layers_in_bf16 num_first_layers_in_bf16 skip_tokenizer_init load_format "
        "enable_vllm_metrics_logger vllm_metrics_logger_interval",
        "servers are always asynchronous, and get the policy's weights",
    ),
    "policy.generation.vllm_kwargs": report(
        "write them as arguments in `generation.vllm.extra_args`", {}, here=("generation.vllm.extra_args",)
    ),
    "policy.generation.vllm_kwargs.*": report(
        "write them as arguments in `generation.vllm.extra_args`", here=("generation.vllm.extra_args",)
    ),
    "policy.generation.mcore_generation_config.*": ignore("the embedded engine chooses them"),
    "data.max_input_seq_length": Key(
        ("data.too_long",),
        "prompts that leave too little space are dropped",
        _convert_input_length,
    ),
    "data.shuffle": report("training data are always shuffled", True),
    "data.num_workers": ignore("one process per node reads the data"),
    "data.validation": ignore("a part of the training data is held out: `data.heldout_fraction`"),
    "data.train": report("set `data.mix` to the data sets, as in [{path: a.jsonl, weight: 1}]", here=("data.mix",)),
    "data.dataset_name": Key(("data.dataset_name", "data.columns"), "a data set of the Hub", _convert_data_set),
    "data.train.dataset_name": Key(("data.dataset_name", "data.columns"), "a data set of the Hub", _convert_data_set),
    "data.train.data_path": copy("data.path", "a file, a directory with splits, or a pattern"),
    "data.train.split": copy("data.split"),
    "data.train.split_validation_size": copy("data.heldout_fraction", unused=(None, 0, 0.0)),
    "data.train.seed": ignore("`train.seed` decides it too"),
    "data.validation.data_path": copy("data.eval_path"),
    "data.validation.dataset_name": report(
        "name its files in `data.eval_path`, or a split of the same data set in `data.eval_split`",
        "ResponseDataset",
        here=("data.eval_path", "data.eval_split"),
    ),
    "data.validation.split": copy("data.eval_split"),
    "data.train_data_path": copy("data.path"),
    "data.val_data_path": copy("data.eval_path"),
    "data.train_split": copy("data.split"),
    "data.val_split": copy("data.eval_split"),
    **{
        f"data.{section}{name}_key": _column(column)
        for section in ("", "default.", "train.")
        for name, column in (("input", "prompt"), ("output", "answer"))
    },
    **{
        f"data.{section}{name}": report(_PROMPT_FILE, here=(here,))
        for section in ("", "default.", "train.")
        for name, here in (("prompt_file", "data.prompt_template"), ("system_prompt_file", "data.system_prompt"))
    },
    "data.default.dataset_name": report("set `data.path` or `data.dataset_name`", "ResponseDataset"),
    **{
        name: Key(("reward.functions", "rollout.environment.name"), "", _convert_environment)
        for name in _ENVIRONMENT_NAMES
    },
    **{
        f"data.{section}processor": ignore("`data.format` and the templates decide how records become text")
        for section in ("", "default.", "train.", "validation.")
    },
    "env.math": Key(("reward.functions",), "`math_verify` if no `env_name` is set", _convert_math),
    "env.math.num_workers": Key(
        ("reward.num_workers", "reward.functions"), "`math_verify` if no `env_name` is set", _convert_math
    ),
    "env.math.math_verify_impl": report("the reward function is `math_verify`", "hf_math_verify"),
    "env.*": report(
        "write its arguments in `kwargs` of `reward.functions`, or in `rollout.environment.kwargs`",
        here=("rollout.environment.kwargs",),
    ),
    "checkpointing.enabled": report("the last weights are always saved", True, here=("train.save_every",)),
    "checkpointing.checkpoint_dir": copy("output_dir"),
    "checkpointing.save_period": only_if("checkpointing.enabled", True, copy("train.save_every")),
    "checkpointing.keep_top_k": keep_checkpoints(
        "the newest ones; `train.keep_best` keeps the best too; `null` keeps all"
    ),
    "checkpointing.metric_name": Key(("train.keep_best",), "an eval metric", _convert_best),
    "checkpointing.higher_is_better": ignore("every metric declares its direction"),
    "checkpointing.checkpoint_must_save_by": copy("train.checkpoint_must_save_by"),
    "checkpointing.save_optimizer": report("the optimizer is always saved", True),
    **ignore_each(
        "checkpointing.",
        "model_save_format save_consolidated model_cache_dir model_repo_id peft_config",
        "any layout can load a checkpoint; `train.export_hf` also exports it",
    ),
    "logger.wandb_enabled": _convert_logger("wandb", "project", "name", "entity"),
    "logger.mlflow_enabled": _convert_logger("mlflow", "experiment_name", "run_name", "tracking_uri"),
    "logger.swanlab_enabled": _convert_logger("swanlab", "project", "name"),
    "logger.tensorboard_enabled": Key(
        ("metric_sinks",),
        "on here by default",
        lambda value, settings: None if value else {"metric_sinks": ["jsonl"]},
    ),
    "logger.num_val_samples_to_print": report(
        "set `rollout.save_every`; `rl-megatron rollouts` shows them", 0, here=("rollout.save_every",)
    ),
    **{
        f"logger.{name}.*": read_with(f"logger.{name}_enabled", f"logger.{name}")
        for name in ("wandb", "mlflow", "swanlab")
    },
    "logger.*": ignore("metrics, costs and TensorBoard's files are in `output_dir`"),
    "cluster.gpus_per_node": report("start the run by `torchrun --nproc-per-node N -m rl_megatron train`"),
    "cluster.num_nodes": report("start the run by `torchrun --nnodes N`, or by scripts/train.slurm", 1),
    "cluster.*": ignore("torchrun places the ranks"),
}


def _find_unread(settings: Settings) -> dict[str, str]:
    if settings.get(_MEGATRON):
        return dict.fromkeys(("policy.dtensor_cfg.", "policy.optimizer.", "policy.scheduler"), f"{_MEGATRON} is true")
    return {"policy.megatron_cfg.": f"{_MEGATRON} is not true"}


LIBRARY = Library("NeMo RL", KEYS, {"policy.scheduler": None}, sections=SECTIONS, find_unread=_find_unread)

"""The keys of NeMo RL's configuration files (0.8), such as examples/configs/grpo_math_1B.yaml."""

from __future__ import annotations

from typing import Any

from rl_megatron.config.migration.keys import (
    Converted,
    Key,
    Library,
    Settings,
    automatic,
    compute,
    if_true,
    initial_model,
    missing,
    only_if,
    read_with,
    rename,
    same,
    steps_only,
)

_PAIRS = ("dpo", "rm")  # the sections whose batch sizes count pairs
_MEGATRON = "policy.megatron_cfg.enabled"
_ESTIMATOR = "grpo.adv_estimator.name"
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


def _convert_advantage(here: str) -> Key:
    """Return a key of advantages relative to a group, which other estimators do not read."""
    return Key(
        (here,),
        "",
        lambda value, settings: {here: value} if settings.get(_ESTIMATOR, "grpo") == "grpo" else None,
    )


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
    stages = [stage for stage in value if "name" in stage] if isinstance(value, list) else []
    names = [str(stage["name"]).rpartition(".")[2] for stage in stages]
    if names not in (["LinearLR", "ConstantLR"], ["LinearLR"], ["ConstantLR"]):
        return "set optimizer.warmup_steps and optimizer.decay_style: constant, linear, cosine or inverse-square-root"
    warmup = stages[0].get("kwargs", {}).get("total_iters", 0) if names[0] == "LinearLR" else 0
    return {"optimizer.decay_style": "constant", "optimizer.warmup_steps": warmup}


def _convert_betas(value: Any, settings: Settings) -> Converted:
    return {"optimizer.beta1": value[0], "optimizer.beta2": value[1]}


def _convert_best(value: Any, settings: Settings) -> Converted:
    name = str(value).removeprefix("val:").removeprefix("val_")
    saved, evaluated = settings.get("checkpointing.save_period"), settings.get("grpo.val_period")
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
        return {"reward.functions": [{"name": "math_verify"}]}
    return (
        "set reward.functions, or rollout.worker=conversation with rollout.environment.name: the class of your "
        "environment runs as it is"
    )


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
        f"{section}.max_num_steps": same("train.steps"),
        f"{section}.max_num_epochs": steps_only(),
        f"{section}.val_period": same("train.eval_every"),
        f"{section}.val_at_start": automatic("the first evaluation, before the first step, always happens"),
        f"{section}.val_at_end": automatic("the last evaluation always happens"),
        f"{section}.val_batch_size": automatic("an evaluation uses the batches of training"),
        f"{section}.val_global_batch_size": automatic("an evaluation uses the batches of training"),
        f"{section}.val_micro_batch_size": automatic("an evaluation uses the microbatches of training"),
        f"{section}.val_batches": missing(
            "set `data.num_eval_examples`, in sequences", here=("data.num_eval_examples",)
        ),
        f"{section}.max_val_samples": same("data.num_eval_examples"),
        f"{section}.seed": same("train.seed"),
    }


def _list_megatron_keys() -> dict[str, Key]:
    prefix = "policy.megatron_cfg."
    keys = {
        "tensor_model_parallel_size": same("parallel.tensor"),
        "pipeline_model_parallel_size": same("parallel.pipeline"),
        "context_parallel_size": same("parallel.context", "without packing too"),
        "expert_model_parallel_size": same("parallel.expert"),
        "expert_tensor_parallel_size": same("parallel.expert_tensor"),
        "num_layers_in_first_pipeline_stage": same("parallel.first_stage_layers"),
        "num_layers_in_last_pipeline_stage": same("parallel.last_stage_layers"),
        "sequence_parallel": same("parallel.sequence"),
        "activation_checkpointing": if_true({"model.recompute": "full"}),
        "moe_router_bias_update_rate": same("model.router_bias_update", unused=(None, 0.0)),
        "moe_router_load_balancing_type": missing(
            "set `model.router_aux_loss`", "none", here=("model.router_aux_loss",)
        ),
        "freeze_moe_router": missing("the router is trained", False),
        "optimizer.optimizer": missing("the optimizer is always Adam with decoupled weight decay", "adam"),
        "optimizer.lr": same("optimizer.lr", "the default here, 1e-3, is for tiny models"),
        "optimizer.min_lr": same("optimizer.min_lr"),
        "optimizer.weight_decay": same("optimizer.weight_decay"),
        "optimizer.adam_beta1": same("optimizer.beta1"),
        "optimizer.adam_beta2": same("optimizer.beta2"),
        "optimizer.adam_eps": same("optimizer.epsilon"),
        "optimizer.clip_grad": same("optimizer.clip_grad"),
        "optimizer.use_distributed_optimizer": same("optimizer.distributed"),
        "optimizer.optimizer_cpu_offload": missing("the optimizer stays on the device", False),
        "optimizer.*": automatic("`precision` decides which dtypes the optimizer uses"),
        "scheduler.lr_decay_style": same("optimizer.decay_style"),
        "scheduler.lr_decay_iters": same("optimizer.decay_steps"),
        "scheduler.lr_warmup_iters": same("optimizer.warmup_steps"),
        "scheduler.lr_warmup_init": missing("the warmup begins at 0", 0, 0.0),
        "scheduler.*": automatic("the weight decay is constant"),
        "distributed_data_parallel_config.overlap_grad_reduce": same("optimizer.overlap"),
        "distributed_data_parallel_config.use_custom_fsdp": missing(
            "weights are not sharded over data-parallel ranks; `optimizer.distributed` shards the optimizer state",
            False,
        ),
        "distributed_data_parallel_config.*": automatic("`optimizer.overlap` decides this too"),
        "fp8_cfg": missing("there is no FP8; set `precision=bf16`"),
        "fp8_cfg.enabled": missing("there is no FP8; set `precision=bf16`", False),
        "fp8_cfg.*": read_with("fp8_cfg.enabled"),
        "peft.enabled": read_with("policy.megatron_cfg.peft.dim"),
        "peft.dim": only_if(f"{prefix}peft.enabled", True, same("peft.r")),
        "peft.alpha": only_if(f"{prefix}peft.enabled", True, same("peft.lora_alpha")),
        "peft.dropout": only_if(f"{prefix}peft.enabled", True, same("peft.lora_dropout")),
        "peft.target_modules": only_if(
            f"{prefix}peft.enabled",
            True,
            missing("modules have their Hugging Face names, such as q_proj", [], here=("peft.target_modules",)),
        ),
        "peft.*": automatic("A starts randomly and B at 0"),
        "enabled": automatic("models always run on megatron-core"),
        "converter_type": automatic("`rl-megatron convert import` recognises the model"),
        "env_vars": missing("set environment variables before the command"),
        "env_vars.*": missing("set environment variables before the command"),
        "*": automatic("it is chosen here, or changes no result"),
    }
    return {f"{prefix}{name}": key for name, key in keys.items()}


def _list_dtensor_keys() -> dict[str, Key]:
    keys = {
        "tensor_parallel_size": same("parallel.tensor"),
        "context_parallel_size": same("parallel.context"),
        "expert_parallel_size": same("parallel.expert"),
        "sequence_parallel": same("parallel.sequence"),
        "activation_checkpointing": if_true({"model.recompute": "full"}),
        "cpu_offload": missing("weights and the optimizer stay on the device", False),
        "lora_cfg.enabled": read_with("policy.dtensor_cfg.lora_cfg.dim"),
        "lora_cfg.dim": only_if("policy.dtensor_cfg.lora_cfg.enabled", True, same("peft.r")),
        "lora_cfg.alpha": only_if("policy.dtensor_cfg.lora_cfg.enabled", True, same("peft.lora_alpha")),
        "lora_cfg.dropout": only_if("policy.dtensor_cfg.lora_cfg.enabled", True, same("peft.lora_dropout")),
        "lora_cfg.target_modules": only_if(
            "policy.dtensor_cfg.lora_cfg.enabled", True, same("peft.target_modules", unused=(None, []))
        ),
        "lora_cfg.exclude_modules": only_if(
            "policy.dtensor_cfg.lora_cfg.enabled", True, same("peft.exclude_modules", unused=(None, []))
        ),
        "*": automatic("models always run on megatron-core"),
    }
    return {f"policy.dtensor_cfg.{name}": key for name, key in keys.items()}


KEYS: dict[str, Key] = {
    **{name: key for section in SECTIONS for name, key in _list_common_keys(section).items()},
    "grpo.num_prompts_per_step": same("algorithm.prompts_per_step"),
    "grpo.num_generations_per_prompt": same("algorithm.samples_per_prompt"),
    _ESTIMATOR: Key(("algorithm.advantage_estimator",), "", _convert_estimator),
    "grpo.adv_estimator.normalize_rewards": _convert_advantage("algorithm.normalize_std"),
    "grpo.adv_estimator.use_leave_one_out_baseline": _convert_advantage("algorithm.leave_one_out"),
    "grpo.adv_estimator.minus_baseline": read_with(_ESTIMATOR, "algorithm.advantage_estimator"),
    "grpo.normalize_rewards": _convert_advantage("algorithm.normalize_std"),
    "grpo.use_leave_one_out_baseline": _convert_advantage("algorithm.leave_one_out"),
    "grpo.use_dynamic_sampling": same("algorithm.dynamic_sampling"),
    "grpo.dynamic_sampling_max_gen_batches": only_if(
        "grpo.use_dynamic_sampling", True, same("algorithm.dynamic_sampling_max_rounds")
    ),
    "grpo.batch_multiplier": missing("every round of sampling has `algorithm.prompts_per_step` prompts", 1, 1.0),
    "grpo.max_rollout_turns": missing(_TURNS, 1, here=("rollout.max_turns",)),
    "grpo.overlong_filtering": missing(
        "no completion is left out because it was cut off; the reward function `overlong` lowers its reward",
        False,
        here=("reward.functions",),
    ),
    "grpo.reward_shaping.enabled": Key(("reward.functions",), "the reward function `overlong`", _convert_shaping),
    "grpo.reward_shaping.*": read_with("grpo.reward_shaping.enabled", "reward.functions"),
    "grpo.reward_scaling.enabled": missing("scale the rewards in your reward function", False),
    "grpo.reward_scaling.*": read_with("grpo.reward_scaling.enabled"),
    "grpo.async_grpo.enabled": same("rollout.async_enabled"),
    "grpo.async_grpo.max_trajectory_age_steps": only_if(
        "grpo.async_grpo.enabled", True, same("rollout.max_trajectory_age_steps")
    ),
    "grpo.async_grpo.in_flight_weight_updates": only_if(
        "grpo.async_grpo.enabled", True, same("rollout.in_flight_weight_updates")
    ),
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates": Key(
        ("rollout.recompute_kv_cache_after_weight_updates",),
        "every engine recomputes it",
        lambda value, settings: None,
    ),
    "grpo.val_num_generations_per_prompt": missing("set `n` of each set of `eval.sets`", 1, here=("eval.sets",)),
    "grpo.stop_at_validation_*": missing("set `train.stop_at`, as in {reward: 0.9}", here=("train.stop_at",)),
    "distillation.num_prompts_per_step": same("algorithm.prompts_per_step"),
    "distillation.num_generations_per_prompt": same("algorithm.samples_per_prompt"),
    "distillation.topk_logits_k": same("algorithm.top_k"),
    "distillation.max_rollout_turns": missing(_TURNS, 1, here=("rollout.max_turns",)),
    "teacher.model_name": missing(
        "name the imported teacher in `algorithm.teachers`, as in [{init_from: checkpoints/teacher}]",
        here=("algorithm.teachers",),
    ),
    "teacher.*": automatic("the teacher uses the policy's layout"),
    **{f"dpo.{name}": same(f"loss.{name}") for name in _DPO_KEYS},
    **{f"loss_fn.{name}": same(f"loss.{name}") for name in _LOSS_KEYS},
    "loss_fn.kl_input_clamp_value": same("loss.kl_input_clamp_value", unused=()),
    "loss_fn.kl_output_clamp_value": same("loss.kl_output_clamp_value", unused=()),
    "loss_fn.truncated_importance_sampling_ratio": Key(
        ("loss.truncated_importance_sampling_ratio", "loss.truncated_importance_sampling_type"), "", _convert_truncation
    ),
    "loss_fn.truncated_importance_sampling_ratio_min": only_if(
        "loss_fn.use_importance_sampling_correction", True, same("loss.truncated_importance_sampling_ratio_min")
    ),
    "loss_fn.truncated_importance_sampling_type": read_with(
        "loss_fn.truncated_importance_sampling_ratio", "loss.truncated_importance_sampling_type"
    ),
    "policy.model_name": initial_model(),
    "policy.tokenizer.name": Key(
        ("tokenizer.path",),
        "a directory; the tokenizer that was imported with the model is the default",
        lambda value, settings: None if value == settings.get("policy.model_name") else {"tokenizer.path": value},
    ),
    "policy.tokenizer.chat_template": same("data.chat_template", "a Jinja file, or the template", ("default", None)),
    "policy.tokenizer.chat_template_kwargs": same("data.chat_template_kwargs"),
    "policy.hf_config_overrides": missing("set keys of `model`", {}),
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
    "policy.logprob_batch_size": automatic("microbatches of training and of logprobs have the same size"),
    "policy.logprob_chunk_size": Key(
        ("train.fused_head",), "logits are computed in blocks", lambda value, settings: {"train.fused_head": True}
    ),
    "policy.generation_batch_size": only_if(
        "policy.generation.backend", "megatron", same("generation.batch_size", "of the embedded engine")
    ),
    "policy.max_total_sequence_length": Key(
        ("model.max_sequence_length",), "prompt and completion together", _convert_total_length
    ),
    "policy.precision": rename("precision", _PRECISIONS),
    "policy.max_grad_norm": same("optimizer.clip_grad"),
    "policy.make_sequence_length_divisible_by": automatic("sequences are padded as the layout needs"),
    "policy.offload_optimizer_for_logprob": missing("the optimizer stays on the device", False),
    "policy.refit_buffer_size_gb": compute("generation.refit_bucket_mb", lambda value, settings: value * 1024),
    "policy.sequence_packing.enabled": if_true({"train.batching": "packed"}, "for every loss and layout"),
    "policy.sequence_packing.train_mb_tokens": only_if(
        "policy.sequence_packing.enabled", True, same("train.micro_batch_tokens")
    ),
    "policy.sequence_packing.*": automatic("sequences are packed as the layout needs"),
    "policy.dynamic_batching.enabled": if_true({"train.batching": "dynamic"}),
    "policy.dynamic_batching.train_mb_tokens": only_if(
        "policy.dynamic_batching.enabled", True, same("train.micro_batch_tokens")
    ),
    "policy.dynamic_batching.*": automatic("lengths are rounded as the layout needs"),
    "policy.optimizer.name": missing(
        "the optimizer is always Adam with decoupled weight decay", "torch.optim.AdamW", "torch.optim.adamw.AdamW"
    ),
    "policy.optimizer.kwargs.lr": same("optimizer.lr", "the default here, 1e-3, is for tiny models"),
    "policy.optimizer.kwargs.weight_decay": same("optimizer.weight_decay"),
    "policy.optimizer.kwargs.betas": Key(("optimizer.beta1", "optimizer.beta2"), "", _convert_betas),
    "policy.optimizer.kwargs.eps": same("optimizer.epsilon"),
    "policy.optimizer.kwargs.*": automatic("it changes no result"),
    "policy.scheduler": Key(("optimizer.warmup_steps", "optimizer.decay_style"), "", _convert_scheduler),
    "policy.scheduler.*": missing("set `optimizer.warmup_steps` and `optimizer.decay_style`"),
    **_list_dtensor_keys(),
    **_list_megatron_keys(),
    "policy.generation.backend": rename("generation.engine", _BACKENDS, "`embedded`: the policy itself generates"),
    "policy.generation.max_new_tokens": Key(
        ("generation.max_new_tokens", "rollout.max_tokens", "model.max_sequence_length"),
        "32 here by default; prompt and completion together fit `model.max_sequence_length`",
        _convert_new_tokens,
    ),
    "policy.generation.temperature": same("generation.temperature"),
    "policy.generation.top_p": same("generation.top_p"),
    "policy.generation.top_k": same("generation.top_k", "0 is off", (None, -1)),
    "policy.generation.val_temperature": missing("set `temperature` of each set of `eval.sets`", here=("eval.sets",)),
    "policy.generation.stop_token_ids": missing(
        "set `generation.stop_tokens` to the texts of the tokens", [], here=("generation.stop_tokens",)
    ),
    "policy.generation.stop_strings": same("generation.stop_strings", unused=(None, [])),
    "policy.generation.colocated.enabled": Key(
        ("generation.refit",),
        "`shared_memory`: the servers run on the policy's GPUs",
        lambda value, settings: (
            {"generation.refit": "shared_memory"}
            if value and settings.get("policy.generation.backend") in ("vllm", "sglang")
            else None
        ),
    ),
    "policy.generation.colocated.resources.*": missing(
        "start servers on other nodes by `rl-megatron serve`, and name them in `generation.vllm.server_nodes`",
        here=("generation.vllm.server_nodes",),
    ),
    "policy.generation.vllm_cfg.tensor_parallel_size": only_if(*_VLLM, same("generation.vllm.tensor_parallel_size")),
    "policy.generation.vllm_cfg.gpu_memory_utilization": only_if(
        *_VLLM, same("generation.vllm.gpu_memory_utilization")
    ),
    "policy.generation.vllm_cfg.max_model_len": only_if(*_VLLM, same("generation.vllm.max_model_len")),
    "policy.generation.vllm_cfg.enforce_eager": only_if(*_VLLM, same("generation.vllm.enforce_eager")),
    "policy.generation.vllm_cfg.pipeline_parallel_size": missing(
        "add --pipeline-parallel-size to `generation.vllm.extra_args`", 1, here=("generation.vllm.extra_args",)
    ),
    "policy.generation.vllm_cfg.expert_parallel_size": missing(
        "add --enable-expert-parallel to `generation.vllm.extra_args`", 1, here=("generation.vllm.extra_args",)
    ),
    "policy.generation.vllm_cfg.*": automatic("servers are always asynchronous, and get the policy's weights"),
    "policy.generation.vllm_kwargs": missing(
        "write them as arguments in `generation.vllm.extra_args`", {}, here=("generation.vllm.extra_args",)
    ),
    "policy.generation.vllm_kwargs.*": missing(
        "write them as arguments in `generation.vllm.extra_args`", here=("generation.vllm.extra_args",)
    ),
    "policy.generation.mcore_generation_config.*": automatic("the embedded engine chooses them"),
    "data.max_input_seq_length": Key(
        ("data.too_long",),
        "longer prompts are dropped",
        lambda value, settings: {"data.too_long": "drop"},
    ),
    "data.shuffle": missing("training data are always shuffled", True),
    "data.num_workers": automatic("one process per node reads the data"),
    "data.validation": automatic("a part of the training data is held out: `data.heldout_fraction`"),
    "data.train": missing("set `data.mix` to the data sets, as in [{path: a.jsonl, weight: 1}]", here=("data.mix",)),
    "data.dataset_name": Key(("data.dataset_name", "data.columns"), "a data set of the Hub", _convert_data_set),
    "data.train.dataset_name": Key(("data.dataset_name", "data.columns"), "a data set of the Hub", _convert_data_set),
    "data.train.data_path": same("data.path", "a file, a directory with splits, or a pattern"),
    "data.train.split": same("data.split"),
    "data.train.split_validation_size": same("data.heldout_fraction", unused=(None, 0, 0.0)),
    "data.train.seed": automatic("`train.seed` decides it too"),
    "data.validation.data_path": same("data.eval_path"),
    "data.validation.dataset_name": missing(
        "name its files in `data.eval_path`, or a split of the same data set in `data.eval_split`",
        "ResponseDataset",
        here=("data.eval_path", "data.eval_split"),
    ),
    "data.validation.split": same("data.eval_split"),
    "data.train_data_path": same("data.path"),
    "data.val_data_path": same("data.eval_path"),
    "data.train_split": same("data.split"),
    "data.val_split": same("data.eval_split"),
    **{
        f"data.{section}{name}_key": _column(column)
        for section in ("", "default.", "train.")
        for name, column in (("input", "prompt"), ("output", "answer"))
    },
    **{
        f"data.{section}{name}": missing(_PROMPT_FILE, here=(here,))
        for section in ("", "default.", "train.")
        for name, here in (("prompt_file", "data.prompt_template"), ("system_prompt_file", "data.system_prompt"))
    },
    "data.default.dataset_name": missing("set `data.path` or `data.dataset_name`", "ResponseDataset"),
    "data.default.env_name": Key(("reward.functions", "rollout.environment.name"), "", _convert_environment),
    "data.train.env_name": Key(("reward.functions", "rollout.environment.name"), "", _convert_environment),
    **{
        f"data.{section}processor": automatic("`data.format` and the templates decide how records become text")
        for section in ("", "default.", "train.", "validation.")
    },
    "env.math.num_workers": same("reward.num_workers"),
    "env.math.math_verify_impl": missing("the reward function is `math_verify`", "hf_math_verify"),
    "env.*": missing(
        "write its arguments in `kwargs` of `reward.functions`, or in `rollout.environment.kwargs`",
        here=("rollout.environment.kwargs",),
    ),
    "checkpointing.enabled": missing("the last weights are always saved", True, here=("train.save_every",)),
    "checkpointing.checkpoint_dir": same("output_dir"),
    "checkpointing.save_period": only_if("checkpointing.enabled", True, same("train.save_every")),
    "checkpointing.keep_top_k": same("train.keep_checkpoints", "the newest ones; `train.keep_best` keeps the best too"),
    "checkpointing.metric_name": Key(("train.keep_best",), "an eval metric", _convert_best),
    "checkpointing.higher_is_better": automatic("every metric declares its direction"),
    "checkpointing.checkpoint_must_save_by": same("train.checkpoint_must_save_by"),
    "checkpointing.save_optimizer": missing("the optimizer is always saved", True),
    "checkpointing.*": automatic("any layout can load a checkpoint; `train.export_hf` also exports it"),
    "logger.wandb_enabled": _convert_logger("wandb", "project", "name", "entity"),
    "logger.mlflow_enabled": _convert_logger("mlflow", "experiment_name", "run_name", "tracking_uri"),
    "logger.swanlab_enabled": _convert_logger("swanlab", "project", "name"),
    "logger.tensorboard_enabled": Key(
        ("metric_sinks",),
        "on here by default",
        lambda value, settings: None if value else {"metric_sinks": ["jsonl"]},
    ),
    "logger.num_val_samples_to_print": missing(
        "set `rollout.save_every`; `rl-megatron rollouts` shows them", 0, here=("rollout.save_every",)
    ),
    **{
        f"logger.{name}.*": read_with(f"logger.{name}_enabled", f"logger.{name}")
        for name in ("wandb", "mlflow", "swanlab")
    },
    "logger.*": automatic("metrics, costs and TensorBoard's files are in `output_dir`"),
    "cluster.gpus_per_node": missing("start the run by `torchrun --nproc-per-node N -m rl_megatron train`"),
    "cluster.num_nodes": missing("start the run by `torchrun --nnodes N`, or by scripts/train.slurm", 1),
    "cluster.*": automatic("torchrun places the ranks"),
}


def _find_unread(settings: Settings) -> dict[str, str]:
    if settings.get(_MEGATRON):
        return dict.fromkeys(("policy.dtensor_cfg.", "policy.optimizer.", "policy.scheduler"), f"{_MEGATRON} is true")
    return {"policy.megatron_cfg.": f"{_MEGATRON} is not true"}


LIBRARY = Library("NeMo RL", KEYS, sections=SECTIONS, find_unread=_find_unread)

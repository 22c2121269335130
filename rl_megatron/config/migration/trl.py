"""The arguments of TRL's trainers and of their configurations (1.16), which the package reads from a script.

A key is the name of an argument. A key such as `DPOConfig.beta` is an argument that has another meaning in this class.
"""

from __future__ import annotations

import math
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

_SAMPLING = ("GRPOConfig", "RLOOConfig", "OnlineDPOConfig", "GMPOConfig")  # configurations that sample completions
_PAIRS = ("DPOConfig", "RewardConfig", "CPOConfig", "ORPOConfig")  # configurations whose batches count pairs
_RLOO = {
    "algorithm": "grpo",
    "algorithm.leave_one_out": True,
    "algorithm.normalize_std": False,
    "loss.disable_ppo_ratio": True,
    "loss.fixed_sequence_length": 1.0,
}
# Trainer → the presets and keys that it stands for.
TRAINERS: dict[str, dict[str, object]] = {
    "GRPOTrainer": {"algorithm": "grpo"},
    "SFTTrainer": {"algorithm": "sft"},
    "DPOTrainer": {"algorithm": "dpo", "loss": "dpo"},
    "KTOTrainer": {"algorithm": "kto", "loss": "kto"},
    "RewardTrainer": {"algorithm": "reward_model", "loss": "preference"},
    "RLOOTrainer": _RLOO,
    "OnlineDPOTrainer": {"algorithm": "online_dpo", "loss": "dpo"},
    "CPOTrainer": {"algorithm": "dpo", "loss": "cpo"},
    "ORPOTrainer": {"algorithm": "dpo", "loss": "orpo"},
    "GMPOTrainer": {"algorithm": "grpo", "loss.use_gmpo": True, "loss.token_level_loss": False},
    "GKDTrainer": {"algorithm": "on_policy_distillation", "loss": "full_distillation"},
}
_COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "lr_scheduler_type": "linear",
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "bf16": True,
    "gradient_checkpointing": True,
    "seed": 42,
    "save_steps": 500,
}
_OF_CONFIGS: dict[str, dict[str, Any]] = {
    "GRPOConfig": {
        "learning_rate": 1e-6,
        "GRPOConfig.beta": 0.0,
        "num_generations": 8,
        "max_completion_length": 512,
        "vllm_importance_sampling_mode": "sequence_mask",
    },
    "RLOOConfig": {
        "learning_rate": 1e-6,
        "RLOOConfig.beta": 0.05,
        "num_generations": 2,
        "max_completion_length": 512,
    },
    "SFTConfig": {"learning_rate": 2e-5, "max_length": 1024, "truncation_mode": "keep_start"},
    "DPOConfig": {"learning_rate": 1e-6, "max_length": 1024, "truncation_mode": "keep_start", "DPOConfig.beta": 0.1},
    "KTOConfig": {"learning_rate": 1e-6, "max_length": 1024},
    "RewardConfig": {"learning_rate": 1e-4, "max_length": 1024},
    "GMPOConfig": {"learning_rate": 1e-6, "num_generations": 8, "max_completion_length": 512},
}


def find_defaults(config: str) -> dict[str, Any]:
    """Return the defaults of a configuration class where a default here differs."""
    return _COMMON | _OF_CONFIGS.get(config, {})


def _count_batch(settings: Settings) -> int:
    """Return the sequences, or pairs, of an optimizer step on one device."""
    return settings["per_device_train_batch_size"] * settings.get("gradient_accumulation_steps", 1)


def _count_generated(settings: Settings) -> int:
    """Return the completions of a rollout step on one device."""
    steps = settings.get("steps_per_generation") or settings.get("gradient_accumulation_steps", 1)
    return settings.get("generation_batch_size") or settings["per_device_train_batch_size"] * steps


def _samples(settings: Settings) -> bool:
    return settings.get("config") in _SAMPLING


def _convert_batch(value: Any, settings: Settings) -> Converted:
    if not _samples(settings):
        factor = 2 if settings.get("config") in _PAIRS else 1
        return {"train.global_batch_size": factor * _count_batch(settings), "train.micro_batch_size": factor * value}
    generated, samples = _count_generated(settings), settings.get("num_generations", 8)
    if generated % samples:
        return f"{generated} completions a generation are not a multiple of num_generations={samples}; change one"
    return {"train.global_batch_size": _count_batch(settings), "algorithm.prompts_per_step": generated // samples}


def _convert_steps(value: Any, settings: Settings) -> Converted:
    """Return the rollout steps of TRL's optimizer steps, or the steps themselves if nothing is sampled."""
    if value <= 0:
        return None
    if not _samples(settings):
        return {"train.steps": value}
    updates = _count_generated(settings) / _count_batch(settings) * settings.get("num_iterations", 1)
    return {"train.steps": math.ceil(value / updates)}


def _convert_epochs(value: Any, settings: Settings) -> Converted:
    if settings.get("max_steps", -1) > 0:
        return None
    return steps_only().note


def _convert_warmup(value: Any, settings: Settings) -> Converted:
    if value >= 1 or not value:
        return {"optimizer.warmup_steps": int(value)}
    steps = settings.get("max_steps", -1)
    if steps <= 0:
        return f"set optimizer.warmup_steps to {value} of the optimizer steps"
    return {"optimizer.warmup_steps": round(value * steps)}


def _convert_loss_type(value: Any, settings: Settings) -> Converted:
    """Return the average and the surrogate of GRPO's `loss_type`."""
    if settings.get("importance_sampling_level", "token") == "sequence":
        return (
            None if value == "grpo" else "with one ratio per sequence, the loss averages over sequences, as grpo does"
        )
    if value in ("dapo", "bnpo"):
        return {"loss.token_level_loss": True}
    if value == "grpo":
        return {"loss.token_level_loss": False}
    if value == "dr_grpo":
        return {"loss.fixed_sequence_length": float(settings.get("max_completion_length", 512))}
    if value == "cispo":
        upper = settings.get("epsilon_high") or settings.get("epsilon", 0.2)
        return {"loss.use_cispo": True, "loss.ratio_clip_min": 1.0, "loss.ratio_clip_max": upper - 1.0}
    if value == "sapo":
        return {"loss.use_sapo": True, "loss.token_level_loss": False}
    return "these have a counterpart: dapo, bnpo, grpo, dr_grpo, cispo, sapo; or write your own loss"


def _convert_epsilon(value: Any, settings: Settings) -> Converted:
    if settings.get("GRPOConfig.loss_type") == "cispo":
        return None
    high = settings.get("epsilon_high")
    return {"loss.ratio_clip_min": value, "loss.ratio_clip_max": value if high is None else high}


def _convert_epsilon_high(value: Any, settings: Settings) -> Converted:
    return None if settings.get("GRPOConfig.loss_type") == "cispo" else {"loss.ratio_clip_max": value}


def _convert_scale(value: Any, settings: Settings) -> Converted:
    if value in (True, "group"):
        return {"algorithm.normalize_std": True}
    if value in (False, "none"):
        return {"algorithm.normalize_std": False}
    return "set algorithm.advantage_estimator=reinforce_plus_plus_baseline, which normalizes over the batch too"


def _convert_mode(value: Any, settings: Settings) -> Converted:
    if not settings.get("use_vllm") or not settings.get("vllm_importance_sampling_correction", True):
        return None
    kinds = {"token_truncate": "tis", "token_mask": "icepop"}
    if value not in kinds:
        return (
            "set loss.use_importance_sampling_correction=true with loss.truncated_importance_sampling_type="
            "seq-mask-tis, which bounds the geometric mean of a sequence's ratios, or with tis"
        )
    upper = settings.get("vllm_importance_sampling_clip_max", 3.0)
    lower = settings.get("vllm_importance_sampling_clip_min") or 0.0
    here: dict[str, object] = {
        "loss.use_importance_sampling_correction": True,
        "loss.truncated_importance_sampling_type": kinds[value],
        "loss.truncated_importance_sampling_ratio": upper,
    }
    return here if value == "token_truncate" else here | {"loss.truncated_importance_sampling_ratio_min": lower}


def _convert_vllm_mode(value: Any, settings: Settings) -> Converted:
    if not settings.get("use_vllm") or value == "colocate":
        return None
    return "start servers by rl-megatron serve, and name them in generation.vllm.server_nodes"


def _make_vllm_key(here: str) -> Key:
    """Return a key of vLLM servers that the run itself starts."""

    def convert(value: Any, settings: Settings) -> Converted:
        starts = settings.get("use_vllm") and settings.get("vllm_mode", "colocate") == "colocate"
        return {here: value} if starts else None

    return Key((here,), "", convert)


def _convert_use_vllm(value: Any, settings: Settings) -> Converted:
    if not value:
        return None
    shared = {"generation.refit": "shared_memory"} if settings.get("vllm_mode", "colocate") == "colocate" else {}
    return {"generation.engine": "vllm", **shared}


def _convert_data_set(value: Any, settings: Settings) -> Converted:
    """Return the keys of a call of `load_dataset`, which the reader of the script gives as a mapping."""
    if not isinstance(value, dict):
        return "set data.path to a file of the records: the data set's to_json writes one"
    files = value.get("data_files")
    if value.get("path") in ("json", "parquet", "text", "csv"):
        files = files.get("train") if isinstance(files, dict) else files
        return {"data.path": files} if files else "set data.path to the files"
    split = str(value.get("split") or "")
    if "[" in split:
        return f"split={split!r} is a part of a split: write these records to a file, and set data.path"
    here = {"data.dataset_name": value.get("path"), "data.subset": value.get("name"), "data.split": split or None}
    return {key: entry for key, entry in here.items() if entry is not None}


def _convert_eval_set(value: Any, settings: Settings) -> Converted:
    train = settings.get("train_dataset")
    if not isinstance(value, dict) or not isinstance(train, dict):
        return "set data.eval_path to a file of the records"
    if value.get("data_files"):
        return {"data.eval_path": value["data_files"]}
    if value.get("path") == train.get("path") and "[" not in str(value.get("split")):
        return {"data.eval_split": value.get("split")}
    return "set data.eval_path to a file of the records, or data.eval_split to a split of the training data set"


def _convert_rewards(value: Any, settings: Settings) -> Converted:
    functions = value if isinstance(value, list) else [value]
    weights = settings.get("reward_weights") or [1.0] * len(functions)
    here: list[dict[str, object]] = []
    for function, weight in zip(functions, weights, strict=False):
        if not isinstance(function, str):
            return "set reward.functions to your functions, as in [rewards.py:name]; they run as they are"
        entry: dict[str, object] = {"name": function}
        if ":" not in function:  # a reward model of the Hub
            entry = {"name": "reward_model", "kwargs": {"hf": function}}
        here.append(entry if weight == 1 else {**entry, "weight": weight})
    return {"reward.functions": here}


def _convert_dpo_loss(value: Any, settings: Settings) -> Converted:
    names = value if isinstance(value, list) else [value]
    if names == ["sigmoid"]:
        return None
    if names == ["sigmoid_norm"]:
        return {"loss.preference_average_log_probs": True}
    if names == ["ipo"]:
        return {"loss": "ipo", "loss.preference_average_log_probs": True}
    if names in (["sigmoid", "sft"], ["sft", "sigmoid"]):
        weights = dict(zip(names, settings.get("loss_weights") or [1.0, 1.0], strict=False))
        return {"loss.preference_loss_weight": weights["sigmoid"], "loss.sft_loss_weight": weights["sft"]}
    return "these have a counterpart: sigmoid, sigmoid_norm, ipo, and sigmoid with sft; or write your own loss"


def _convert_dpo_beta(value: Any, settings: Settings) -> Converted:
    is_ipo = settings.get("DPOConfig.loss_type") in ("ipo", ["ipo"])
    return {"loss.tau" if is_ipo else "loss.reference_policy_kl_penalty": value}


def _convert_cpo_loss(value: Any, settings: Settings) -> Converted:
    if value == "sigmoid":
        return None
    return {"loss": "simpo"} if value == "simpo" else "these have a counterpart: sigmoid, simpo"


def _convert_services(value: Any, settings: Settings) -> Converted:
    names = value if isinstance(value, list) else [value]
    services = ("wandb", "mlflow", "swanlab", "trackio")
    others = [name for name in names if name not in (*services, "none", "tensorboard")]
    if others:
        return f"{others[0]} has no counterpart; these do: tensorboard, {', '.join(services)}"
    run = settings.get("run_name")
    key = {"mlflow": "run_name"}
    return {f"logger.{name}": {key.get(name, "name"): run} if run else {} for name in names if name in services} or None


def _convert_strategy(value: Any, settings: Settings) -> Converted:
    return None if value in ("steps", "no") else "set train.save_every and train.eval_every, in steps"


_STEPS_KEY = "eval_strategy", "steps"
_DECAYS = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse-square-root",
}
_SHARDING = "set `parallel` and `optimizer.distributed`: models run on megatron-core"

KEYS: dict[str, Key] = {
    **{name: Key(tuple(here), "", lambda value, settings, here=here: here) for name, here in TRAINERS.items()},
    "model": initial_model(),
    "processing_class": automatic("the tokenizer that was imported with the model", "tokenizer.path"),
    "train_dataset": Key(("data.path", "data.dataset_name", "data.subset", "data.split"), "", _convert_data_set),
    "train_dataset.map": missing(
        "the script changes records in code: rename fields by `data.columns`, or write the changed records to a file",
        here=("data.columns",),
    ),
    "eval_dataset": Key(("data.eval_path", "data.eval_split"), "", _convert_eval_set),
    "reward_funcs": Key(("reward.functions",), "functions written for TRL run as they are", _convert_rewards),
    "reward_funcs.file": missing(
        "importing this file would train: move the functions to a file of their own, or call the trainer under "
        '`if __name__ == "__main__"`'
    ),
    "config": automatic("its arguments are read"),
    "reward_weights": read_with("reward_funcs", "reward.functions"),
    "peft_config": read_with("LoraConfig.r", "peft.r"),
    "args": automatic("its arguments are read"),
    "tools": missing("name functions in `rollout.tools.functions`", here=("rollout.tools.functions",)),
    "environment_factory": missing(
        "set `rollout.environment.name` and `rollout.worker=conversation`", here=("rollout.environment.name",)
    ),
    "rollout_func": missing("set `rollout.worker` to your function", here=("rollout.worker",)),
    "callbacks": missing("metrics go to `metric_sinks` and `logger`; `train.stop_at` ends a stage at a goal"),
    "output_dir": same("output_dir"),
    "learning_rate": same("optimizer.lr", "the default here, 1e-3, is for tiny models"),
    "per_device_train_batch_size": Key(
        ("train.global_batch_size", "train.micro_batch_size", "algorithm.prompts_per_step"),
        "times gradient_accumulation_steps, on one device: multiply it by your devices; a pair is two sequences",
        _convert_batch,
    ),
    "gradient_accumulation_steps": read_with("per_device_train_batch_size", "train.global_batch_size"),
    "generation_batch_size": read_with("per_device_train_batch_size", "algorithm.prompts_per_step"),
    "steps_per_generation": read_with("per_device_train_batch_size", "algorithm.prompts_per_step"),
    "per_device_eval_batch_size": automatic("an evaluation uses the microbatches of training"),
    "max_steps": Key(("train.steps",), "rollout steps of algorithms that sample", _convert_steps),
    "num_train_epochs": Key(("train.steps",), "`train.steps` counts steps", _convert_epochs),
    "num_generations": same("algorithm.samples_per_prompt"),
    "num_generations_eval": missing("set `n` of each set of `eval.sets`", here=("eval.sets",)),
    "num_iterations": same("algorithm.updates_per_rollout"),
    "max_completion_length": same("generation.max_new_tokens", "32 here by default"),
    "max_new_tokens": same("generation.max_new_tokens"),
    "temperature": same("generation.temperature"),
    "top_p": same("generation.top_p"),
    "top_k": same("generation.top_k"),
    "min_p": missing("set `generation.top_p` or `generation.top_k`", 0.0, here=("generation.top_p",)),
    "repetition_penalty": missing("tokens are sampled from the policy's own distribution", 1.0),
    "generation_kwargs": missing("set keys of `generation`"),
    "chat_template_kwargs": same("data.chat_template_kwargs"),
    "chat_template_path": same("data.chat_template", "a Jinja file"),
    "GRPOConfig.beta": same("loss.reference_policy_kl_penalty", "0 there and 0.01 here by default"),
    "RLOOConfig.beta": same("loss.reference_policy_kl_penalty", "in the reward there, in the loss here"),
    "DPOConfig.beta": Key(
        ("loss.reference_policy_kl_penalty", "loss.tau"),
        "0.1 there and 0.05 here by default; `loss.tau` of `loss=ipo`",
        _convert_dpo_beta,
    ),
    "OnlineDPOConfig.beta": same("loss.reference_policy_kl_penalty"),
    "KTOConfig.beta": same("loss.beta"),
    "CPOConfig.beta": same("loss.beta"),
    "ORPOConfig.beta": same("loss.beta"),
    "KTOConfig.desirable_weight": same("loss.desirable_weight"),
    "KTOConfig.undesirable_weight": same("loss.undesirable_weight"),
    "KTOConfig.loss_type": missing("the loss is `loss=kto`", "kto"),
    "CPOConfig.loss_type": Key(("loss",), "", _convert_cpo_loss),
    "CPOConfig.cpo_alpha": same("loss.sft_loss_weight"),
    "CPOConfig.simpo_gamma": only_if("CPOConfig.loss_type", "simpo", same("loss.gamma")),
    "SFTConfig.loss_type": missing("the loss is the negative log-likelihood", "nll"),
    "DPOConfig.loss_type": Key(
        ("loss", "loss.preference_average_log_probs", "loss.sft_loss_weight"), "", _convert_dpo_loss
    ),
    "loss_weights": read_with("DPOConfig.loss_type", "loss.sft_loss_weight"),
    "GRPOConfig.loss_type": Key(
        (
            "loss.token_level_loss",
            "loss.fixed_sequence_length",
            "loss.use_cispo",
            "loss.use_sapo",
        ),
        "`dapo` is the default of both",
        _convert_loss_type,
    ),
    "epsilon": Key(("loss.ratio_clip_min", "loss.ratio_clip_max"), "", _convert_epsilon),
    "epsilon_high": Key(("loss.ratio_clip_max",), "", _convert_epsilon_high),
    "delta": same("loss.ratio_clip_c"),
    "importance_sampling_level": Key(
        ("loss.sequence_level_importance_ratios", "loss.token_level_loss"),
        "`sequence` is GSPO",
        lambda value, settings: (
            {"loss.sequence_level_importance_ratios": True, "loss.token_level_loss": False}
            if value == "sequence"
            else None
        ),
    ),
    "sapo_temperature_pos": only_if("GRPOConfig.loss_type", "sapo", same("loss.sapo_temperature_pos")),
    "sapo_temperature_neg": only_if("GRPOConfig.loss_type", "sapo", same("loss.sapo_temperature_neg")),
    "scale_rewards": Key(("algorithm.normalize_std",), "", _convert_scale),
    "multi_objective_aggregation": Key(
        ("algorithm.advantage_estimator",),
        "",
        lambda value, settings: (
            {"algorithm.advantage_estimator": "group_decoupled"} if value == "normalize_then_sum" else None
        ),
    ),
    "entropy_coef": same("loss.entropy_coeff"),
    "use_bias_correction_kl": Key(
        ("loss.use_on_policy_kl_approximation",),
        "the KL's gradient always has the term of the sampled tokens here",
        lambda value, settings: None,
    ),
    "use_adaptive_entropy": missing("set `loss.entropy_coeff`, which is fixed", False, here=("loss.entropy_coeff",)),
    "top_entropy_quantile": missing("no token is left out for its entropy; see `loss.use_clip_cov`", 1.0),
    "mask_truncated_completions": missing(
        "no completion is left out because it was cut off; the reward function `overlong` lowers its reward",
        False,
        here=("reward.functions",),
    ),
    "off_policy_mask_threshold": missing(
        "set `loss.sequence_rejection_type` and `loss.sequence_rejection_max`", here=("loss.sequence_rejection_type",)
    ),
    "sync_ref_model": missing("the reference is the model with which the stage began, and never changes", False),
    "normalize_advantages": missing("set `algorithm.advantage_estimator=reinforce_plus_plus_baseline`", False),
    "reward_clip_range": missing("clip the rewards in your reward function"),
    "max_tool_calling_iterations": missing("set `rollout.max_turns`", here=("rollout.max_turns",)),
    "log_completions": Key(
        ("rollout.save_every",),
        "`rl-megatron rollouts` shows the files",
        lambda value, settings: {"rollout.save_every": 1} if value else None,
    ),
    "num_completions_to_print": read_with("log_completions", "rollout.save_prompts"),
    "use_vllm": Key(("generation.engine", "generation.refit"), "", _convert_use_vllm),
    "vllm_mode": Key(("generation.refit", "generation.vllm.server_nodes"), "", _convert_vllm_mode),
    "vllm_gpu_memory_utilization": _make_vllm_key("generation.vllm.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": _make_vllm_key("generation.vllm.tensor_parallel_size"),
    "vllm_max_model_length": _make_vllm_key("generation.vllm.max_model_len"),
    "vllm_enable_sleep_mode": _make_vllm_key("generation.vllm.enable_sleep_mode"),
    "vllm_importance_sampling_correction": read_with(
        "vllm_importance_sampling_mode", "loss.use_importance_sampling_correction"
    ),
    "vllm_importance_sampling_mode": Key(
        (
            "loss.truncated_importance_sampling_type",
            "loss.use_importance_sampling_correction",
            "loss.truncated_importance_sampling_ratio",
            "loss.truncated_importance_sampling_ratio_min",
        ),
        "`token_truncate` is `tis`, and `token_mask` is `icepop`",
        _convert_mode,
    ),
    "vllm_importance_sampling_clip_max": read_with(
        "vllm_importance_sampling_mode", "loss.truncated_importance_sampling_ratio"
    ),
    "vllm_importance_sampling_clip_min": read_with(
        "vllm_importance_sampling_mode", "loss.truncated_importance_sampling_ratio_min"
    ),
    "vllm_*": read_with("vllm_mode", "generation.vllm.server_nodes"),
    "use_transformers_*": missing("set `generation.engine=transformers`", False, here=("generation.engine",)),
    "precompute_ref_log_probs": Key(
        ("algorithm.precompute_reference",),
        "of `algorithm=dpo`",
        lambda value, settings: (
            {"algorithm.precompute_reference": value} if settings.get("config") == "DPOConfig" else None
        ),
    ),
    "label_smoothing": missing("labels are not smoothed; write your own loss", 0.0),
    "max_length": same("model.max_sequence_length"),
    "truncation_mode": rename("data.too_long", {"keep_start": "truncate"}, "`truncate` cuts the end of the answer"),
    "packing": if_true({"train.batching": "packed"}),
    "padding_free": if_true({"train.batching": "packed"}),
    "packing_strategy": automatic("sequences are never split"),
    "assistant_only_loss": Key(
        ("data.trained_turns",),
        "always; `last` trains on the last turn only",
        lambda value, settings: None,
    ),
    "completion_only_loss": missing("the loss of prompts with answers is that of the answers", True),
    "dataset_text_field": missing("text without prompts is for `algorithm=pretrain`", "text", here=("algorithm",)),
    "center_rewards_coefficient": missing("set `mean` and `std` of the reward function `reward_model`"),
    "lr_scheduler_type": rename("optimizer.decay_style", _DECAYS),
    "lr_scheduler_kwargs": missing("set `optimizer.min_lr` and `optimizer.decay_steps`", here=("optimizer.min_lr",)),
    "warmup_steps": Key(("optimizer.warmup_steps",), "", _convert_warmup),
    "warmup_ratio": Key(("optimizer.warmup_steps",), "", _convert_warmup),
    "weight_decay": same("optimizer.weight_decay"),
    "adam_beta1": same("optimizer.beta1"),
    "adam_beta2": same("optimizer.beta2"),
    "adam_epsilon": same("optimizer.epsilon"),
    "max_grad_norm": same("optimizer.clip_grad"),
    "optim": missing("the optimizer is always Adam with decoupled weight decay", "adamw_torch", "adamw_torch_fused"),
    "bf16": if_true({"precision": "bf16"}),
    "fp16": missing("there is no fp16; set `precision=bf16`", False, here=("precision",)),
    "tf32": automatic("megatron-core decides it"),
    "gradient_checkpointing": if_true({"model.recompute": "full"}, "on there and off here by default"),
    "gradient_checkpointing_kwargs": automatic("`model.recompute` decides it"),
    "activation_offloading": missing("set `model.recompute`", False, here=("model.recompute",)),
    "use_liger_kernel": Key(
        ("train.fused_head",),
        "logits are computed in blocks",
        lambda value, settings: {"train.fused_head": True} if value else None,
    ),
    "router_aux_loss_coef": same("model.router_aux_loss"),
    "seed": same("train.seed"),
    "data_seed": automatic("`train.seed` decides it too"),
    "eval_strategy": Key(("train.eval_every",), "in steps", _convert_strategy),
    "eval_steps": only_if(*_STEPS_KEY, same("train.eval_every")),
    "save_strategy": Key(("train.save_every",), "in steps", _convert_strategy),
    "save_steps": Key(
        ("train.save_every",),
        "",
        lambda value, settings: (
            {"train.save_every": value} if settings.get("save_strategy", "steps") == "steps" else None
        ),
    ),
    "save_total_limit": same("train.keep_checkpoints"),
    "metric_for_best_model": missing("set `train.keep_best` to an eval metric", here=("train.keep_best",)),
    "load_best_model_at_end": missing("set `train.keep_best` to an eval metric", False, here=("train.keep_best",)),
    "greater_is_better": automatic("every metric declares its direction"),
    "resume_from_checkpoint": Key(("resume",), "the default", lambda value, settings: None),
    "report_to": Key(
        ("logger.wandb", "logger.mlflow", "logger.swanlab", "logger.trackio"), "several at once", _convert_services
    ),
    "run_name": read_with("report_to", "logger.wandb.name"),
    "logging_steps": automatic("every step is logged"),
    "logging_*": automatic("every step is logged, in `output_dir`"),
    "log_*": automatic("`rollout.save_every` writes completions"),
    "ddp_timeout": compute("train.collective_timeout_minutes", lambda value, settings: value / 60, "seconds there"),
    "push_to_hub": missing("`train.export_hf` writes directories for `hf upload`", False, here=("train.export_hf",)),
    "hub_*": read_with("push_to_hub"),
    "deepspeed": missing(_SHARDING, here=("optimizer.distributed",)),
    "fsdp": missing(_SHARDING, "", [], False, here=("optimizer.distributed",)),
    "fsdp_config": missing(_SHARDING, here=("optimizer.distributed",)),
    "model_init_kwargs": automatic("`precision` and `model.backend` decide it"),
    **{
        name: automatic("it changes no result, or is decided here")
        for name in (
            "trust_remote_code",
            "remove_unused_columns",
            "disable_dropout",
            "cast_lm_head_to_fp32",
            "ds3_gather_for_generation",
            "shuffle_dataset",
            "pad_to_multiple_of",
            "dataset_num_proc",
            "dataloader_num_workers",
            "do_train",
            "do_eval",
            "ddp_find_unused_parameters",
            "torch_empty_cache_steps",
            "cache_implementation",
            "eos_token",
            "pad_token",
        )
    },
    "LoraConfig.r": same("peft.r"),
    "LoraConfig.lora_alpha": same("peft.lora_alpha"),
    "LoraConfig.lora_dropout": same("peft.lora_dropout"),
    "LoraConfig.target_modules": Key(
        ("peft.target_modules",),
        "`all-linear` here by default; peft's default depends on the model",
        lambda value, settings: (
            "peft chooses the modules by the model: set peft.target_modules"
            if value is None
            else {"peft.target_modules": value}
        ),
        (),
    ),
    "LoraConfig.exclude_modules": same("peft.exclude_modules"),
    "LoraConfig.modules_to_save": same("peft.modules_to_save"),
    "LoraConfig.use_rslora": same("peft.use_rslora"),
    "LoraConfig.use_dora": same("peft.use_dora"),
    "LoraConfig.init_lora_weights": missing("B starts at 0", True),
    "LoraConfig.bias": missing("biases are not trained beside an adapter; leave the key out", "none"),
    "LoraConfig.task_type": automatic("the algorithm decides it"),
}

LIBRARY = Library("TRL", KEYS, sections=TRAINERS)

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

_GROUPS = ("GRPOConfig", "RLOOConfig", "GMPOConfig")  # configurations whose batches count completions of groups
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
    "save_total_limit": None,
}
_PREFERENCES = {"learning_rate": 1e-6, "max_length": 1024}
_OF_CONFIGS: dict[str, dict[str, Any]] = {
    "GRPOConfig": {
        "learning_rate": 1e-6,
        "GRPOConfig.beta": 0.0,
        "num_generations": 8,
        "max_completion_length": 512,
        "vllm_importance_sampling_mode": "sequence_mask",
        "use_bias_correction_kl": True,
    },
    "RLOOConfig": {
        "learning_rate": 1e-6,
        "RLOOConfig.beta": 0.05,
        "num_generations": 2,
        "max_completion_length": 512,
    },
    "SFTConfig": {
        "learning_rate": 2e-5,
        "max_length": 1024,
        "truncation_mode": "keep_start",
        "assistant_only_loss": False,
    },
    "DPOConfig": {**_PREFERENCES, "truncation_mode": "keep_start", "DPOConfig.beta": 0.1},
    "KTOConfig": {**_PREFERENCES, "KTOConfig.beta": 0.1},
    "RewardConfig": {"learning_rate": 1e-4, "max_length": 1024},
    "OnlineDPOConfig": {
        "learning_rate": 5e-7,
        "OnlineDPOConfig.beta": [0.1],
        "max_new_tokens": 64,
        "max_length": 512,
        "temperature": 0.9,
    },
    "CPOConfig": {
        **_PREFERENCES,
        "CPOConfig.beta": 0.1,
        "CPOConfig.cpo_alpha": 1.0,
        "CPOConfig.simpo_gamma": 0.5,
    },
    "ORPOConfig": {**_PREFERENCES, "ORPOConfig.beta": 0.1},
}
_OF_CONFIGS["GMPOConfig"] = {
    key: value for key, value in _OF_CONFIGS["GRPOConfig"].items() if key != "GRPOConfig.beta"
} | {"GMPOConfig.beta": 0.0, "epsilon": 0.4}


def find_defaults(config: str) -> dict[str, Any]:
    """Return the defaults of a configuration class where a default here differs."""
    return _COMMON | _OF_CONFIGS.get(config, {})


def _count_batch(settings: Settings) -> int:
    """Return the completions, prompts, pairs or records of an optimizer step on one device."""
    return settings["per_device_train_batch_size"] * settings.get("gradient_accumulation_steps", 1)


def _count_generated(settings: Settings) -> int:
    """Return the completions of a rollout step on one device."""
    steps = settings.get("steps_per_generation") or settings.get("gradient_accumulation_steps", 1)
    return settings["per_device_train_batch_size"] * steps


def _convert_batch(value: Any, settings: Settings) -> Converted:
    config, batch = settings.get("config"), _count_batch(settings)
    if settings.get("packing"):
        return "with packing, a batch counts packs of max_length tokens: set train.global_batch_size, in sequences"
    if config == "OnlineDPOConfig":
        return {"algorithm.prompts_per_step": batch, "train.global_batch_size": 2 * batch}
    if config not in _GROUPS:
        factor = 2 if config in _PAIRS else 1
        return {"train.global_batch_size": factor * batch, "train.micro_batch_size": factor * value}
    if settings.get("generation_batch_size"):
        return {"train.global_batch_size": batch}
    generated, samples = _count_generated(settings), settings.get("num_generations", 8)
    if generated % samples:
        return f"{generated} completions a generation are not a multiple of num_generations={samples}; change one"
    return {"train.global_batch_size": batch, "algorithm.prompts_per_step": generated // samples}


def _convert_generation_batch(value: Any, settings: Settings) -> Converted:
    """Return the prompts of a rollout step: this size is that of all devices."""
    samples = settings.get("num_generations", 8)
    if value % samples:
        return f"{value} completions a generation are not a multiple of num_generations={samples}; change one"
    note = "it counts the completions of all devices, and per_device_train_batch_size those of one: multiply "
    return {"algorithm.prompts_per_step": value // samples}, f"{note}train.global_batch_size by your number of devices"


def _make_steps_key(here: str, note: str = "") -> Key:
    """Return a key in optimizer steps, whose value here counts rollout steps of algorithms with groups."""

    def convert(value: Any, settings: Settings) -> Converted:
        if value <= 0:
            return None
        if value < 1:
            return f"set {here} to {value} of the steps"
        if settings.get("config") not in _GROUPS:
            return {here: value}
        if settings.get("generation_batch_size"):
            return f"set {here} in rollout steps: their optimizer steps depend on your number of devices"
        updates = _count_generated(settings) / _count_batch(settings) * settings.get("num_iterations", 1)
        return {here: math.ceil(value / updates)}

    return Key((here,), note, convert)


def _convert_epochs(value: Any, settings: Settings) -> Converted:
    if settings.get("max_steps", -1) > 0:
        return None
    return report_epochs().note


def _convert_warmup(value: Any, settings: Settings) -> Converted:
    if value >= 1 or not value:
        return {"optimizer.warmup_steps": int(value)}
    steps = settings.get("max_steps", -1)
    if steps <= 0:
        return f"set optimizer.warmup_steps to {value} of the optimizer steps"
    return {"optimizer.warmup_steps": round(value * steps)}


def _convert_loss_type(value: Any, settings: Settings) -> Converted:
    """Return the average and the surrogate of GRPO's `loss_type`."""
    if settings.get("importance_sampling_level") == "sequence":  # it decides the average
        return None
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


def _convert_level(value: Any, settings: Settings) -> Converted:
    if value != "sequence":
        return None
    here = {"loss.sequence_level_importance_ratios": True, "loss.token_level_loss": False}
    average = settings.get("GRPOConfig.loss_type", "dapo")
    note = f"with one ratio per sequence, the loss averages as loss_type=grpo does, and not as {average}"
    return here if average == "grpo" else (here, note)


def _convert_bias_correction(value: Any, settings: Settings) -> Converted:
    if not settings.get("GRPOConfig.beta", settings.get("GMPOConfig.beta")):
        return None
    if value:
        return {"loss.use_on_policy_kl_approximation": True}
    return "the KL's gradient always has the term of the sampled tokens here"


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
    upper = settings.get("vllm_importance_sampling_cap") or settings.get("vllm_importance_sampling_clip_max", 3.0)
    if upper is None:
        return "weights need an upper bound here: set loss.truncated_importance_sampling_ratio"
    here: dict[str, object] = {
        "loss.use_importance_sampling_correction": True,
        "loss.truncated_importance_sampling_type": kinds[value],
        "loss.truncated_importance_sampling_ratio": upper,
    }
    lower = settings.get("vllm_importance_sampling_clip_min")
    if lower is None and value == "token_truncate":
        return here
    return here | {"loss.truncated_importance_sampling_ratio_min": lower or 0.0}


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
    others = value.keys() - {"path", "name", "split", "data_files", "num_proc", "token", "cache_dir"}
    if others:
        return f"{', '.join(sorted(others))} of load_dataset: write the records to a file, and set data.path"
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


_MEAN = "over the tokens of all chosen answers; here, over those of each answer, and then over pairs"
_MEAN_WITH_PROMPTS = _MEAN.replace("answers;", "answers and their prompts;")


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
        here = {
            "loss.preference_loss_weight": weights["sigmoid"],
            "loss.sft_loss_weight": weights["sft"],
            "loss.sft_average_log_probs": True,
        }
        return here, f"TRL averages the SFT loss {_MEAN}"
    return "these have a counterpart: sigmoid, sigmoid_norm, ipo, and sigmoid with sft; or write your own loss"


def _convert_dpo_beta(value: Any, settings: Settings) -> Converted:
    is_ipo = settings.get("DPOConfig.loss_type") in ("ipo", ["ipo"])
    return {"loss.tau" if is_ipo else "loss.reference_policy_kl_penalty": value}


def _convert_cpo_loss(value: Any, settings: Settings) -> Converted:
    if value == "sigmoid":
        return None
    return {"loss": "simpo"} if value == "simpo" else "these have a counterpart: sigmoid, simpo"


def _convert_cpo_alpha(value: Any, settings: Settings) -> Converted:
    here: dict[str, object] = {"loss.sft_loss_weight": value}
    if settings.get("CPOConfig.loss_type") != "simpo":  # whose SFT loss is always a mean
        here["loss.sft_average_log_probs"] = True
    return (here, f"TRL averages the NLL {_MEAN_WITH_PROMPTS}") if value else here


def _convert_online_beta(value: Any, settings: Settings) -> Converted:
    values = value if isinstance(value, list) else [value]
    return {"loss.reference_policy_kl_penalty": values[0]} if len(values) == 1 else "β is the same in all epochs here"


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
    "model": name_model(),
    "processing_class": ignore("the tokenizer that was imported with the model", "tokenizer.path"),
    "train_dataset": Key(("data.path", "data.dataset_name", "data.subset", "data.split"), "", _convert_data_set),
    "train_dataset.map": report(
        "the script changes records in code: rename fields by `data.columns`, or write the changed records to a file",
        here=("data.columns",),
    ),
    "eval_dataset": Key(("data.eval_path", "data.eval_split", "data.heldout_fraction"), "", _convert_eval_set),
    "reward_funcs": Key(("reward.functions",), "functions written for TRL run as they are", _convert_rewards),
    "reward_funcs.file": report(
        "importing this file would train: move the functions to a file of their own, or call the trainer under "
        '`if __name__ == "__main__"`'
    ),
    "arguments of *": report("write every argument as NAME=VALUE in the call; only the first one may have no name"),
    "config": ignore("its arguments are read"),
    "reward_weights": read_with("reward_funcs", "reward.functions"),
    "peft_config": read_with("LoraConfig.r", "peft.r"),
    "args": ignore("its arguments are read"),
    "tools": report("name functions in `rollout.tools.functions`", here=("rollout.tools.functions",)),
    "environment_factory": report(
        "set `rollout.environment.name` and `rollout.worker=conversation`", here=("rollout.environment.name",)
    ),
    "rollout_func": report("set `rollout.worker` to your function", here=("rollout.worker",)),
    "callbacks": report("metrics go to `metric_sinks` and `logger`; `train.stop_at` ends a stage at a goal"),
    "output_dir": copy("output_dir"),
    "learning_rate": copy("optimizer.lr", "the default here, 1e-3, is for tiny models"),
    "per_device_train_batch_size": Key(
        ("train.global_batch_size", "train.micro_batch_size", "algorithm.prompts_per_step"),
        "times gradient_accumulation_steps, on one device: multiply it by your devices; a pair is two sequences",
        _convert_batch,
    ),
    "gradient_accumulation_steps": read_with("per_device_train_batch_size", "train.global_batch_size"),
    "generation_batch_size": Key(("algorithm.prompts_per_step",), "of all devices", _convert_generation_batch),
    "steps_per_generation": read_with("per_device_train_batch_size", "algorithm.prompts_per_step"),
    "per_device_eval_batch_size": ignore("an evaluation uses the microbatches of training"),
    "max_steps": _make_steps_key("train.steps", "rollout steps of algorithms that sample"),
    "num_train_epochs": Key(("train.steps",), "`train.steps` counts steps", _convert_epochs),
    "num_generations": copy("algorithm.samples_per_prompt"),
    "num_generations_eval": report("set `n` of each set of `eval.sets`", here=("eval.sets",)),
    "num_iterations": copy("algorithm.updates_per_rollout"),
    "max_completion_length": copy("generation.max_new_tokens", "32 here by default"),
    "max_new_tokens": copy("generation.max_new_tokens"),
    "temperature": copy("generation.temperature"),
    "top_p": copy("generation.top_p"),
    "top_k": copy("generation.top_k"),
    "min_p": report("set `generation.top_p` or `generation.top_k`", 0.0, here=("generation.top_p",)),
    "repetition_penalty": report("tokens are sampled from the policy's own distribution", 1.0),
    "generation_kwargs": report("set keys of `generation`"),
    "chat_template_kwargs": copy("data.chat_template_kwargs"),
    "chat_template_path": copy("data.chat_template", "a Jinja file"),
    "GRPOConfig.beta": copy("loss.reference_policy_kl_penalty", "0 there and 0.01 here by default"),
    "GMPOConfig.beta": copy("loss.reference_policy_kl_penalty"),
    "RLOOConfig.beta": copy("loss.reference_policy_kl_penalty", "in the reward there, in the loss here"),
    "DPOConfig.beta": Key(
        ("loss.reference_policy_kl_penalty", "loss.tau"),
        "0.1 there and 0.05 here by default; `loss.tau` of `loss=ipo`",
        _convert_dpo_beta,
    ),
    "OnlineDPOConfig.beta": Key(("loss.reference_policy_kl_penalty",), "", _convert_online_beta),
    "OnlineDPOConfig.loss_type": rename("loss", {"sigmoid": None}),
    "KTOConfig.beta": copy("loss.beta"),
    "CPOConfig.beta": copy("loss.beta"),
    "ORPOConfig.beta": Key(
        ("loss.beta",),
        "",
        lambda value, settings: ({"loss.beta": value}, f"beside this term, TRL averages the NLL {_MEAN_WITH_PROMPTS}"),
    ),
    "KTOConfig.desirable_weight": copy("loss.desirable_weight"),
    "KTOConfig.undesirable_weight": copy("loss.undesirable_weight"),
    "KTOConfig.loss_type": report("the loss is `loss=kto`", "kto"),
    "CPOConfig.loss_type": Key(("loss",), "", _convert_cpo_loss),
    "CPOConfig.cpo_alpha": Key(("loss.sft_loss_weight", "loss.sft_average_log_probs"), "", _convert_cpo_alpha),
    "CPOConfig.simpo_gamma": only_if("CPOConfig.loss_type", "simpo", copy("loss.gamma")),
    "SFTConfig.loss_type": report("the loss is the negative log-likelihood", "nll"),
    "DPOConfig.loss_type": Key(
        (
            "loss",
            "loss.preference_average_log_probs",
            "loss.sft_loss_weight",
            "loss.preference_loss_weight",
            "loss.sft_average_log_probs",
        ),
        "",
        _convert_dpo_loss,
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
    "delta": copy("loss.ratio_clip_c"),
    "importance_sampling_level": Key(
        ("loss.sequence_level_importance_ratios", "loss.token_level_loss"),
        "`sequence` is GSPO",
        _convert_level,
    ),
    "sapo_temperature_pos": only_if("GRPOConfig.loss_type", "sapo", copy("loss.sapo_temperature_pos")),
    "sapo_temperature_neg": only_if("GRPOConfig.loss_type", "sapo", copy("loss.sapo_temperature_neg")),
    "scale_rewards": Key(("algorithm.normalize_std",), "", _convert_scale),
    "multi_objective_aggregation": Key(
        ("algorithm.advantage_estimator",),
        "",
        lambda value, settings: (
            {"algorithm.advantage_estimator": "group_decoupled"} if value == "normalize_then_sum" else None
        ),
    ),
    "entropy_coef": copy("loss.entropy_coeff"),
    "use_bias_correction_kl": Key(
        ("loss.use_on_policy_kl_approximation",),
        "the KL's gradient always has the term of the sampled tokens here",
        _convert_bias_correction,
    ),
    "use_adaptive_entropy": report("set `loss.entropy_coeff`, which is fixed", False, here=("loss.entropy_coeff",)),
    "top_entropy_quantile": report("no token is left out for its entropy; see `loss.use_clip_cov`", 1.0),
    "mask_truncated_completions": report(
        "no completion is left out because it was cut off; the reward function `overlong` lowers its reward",
        False,
        here=("reward.functions",),
    ),
    "off_policy_mask_threshold": report(
        "set `loss.sequence_rejection_type` and `loss.sequence_rejection_max`", here=("loss.sequence_rejection_type",)
    ),
    "sync_ref_model": report("the reference is the model with which the stage began, and never changes", False),
    "normalize_advantages": report("set `algorithm.advantage_estimator=reinforce_plus_plus_baseline`", False),
    "reward_clip_range": report("clip the rewards in your reward function"),
    "max_tool_calling_iterations": report("set `rollout.max_turns`", here=("rollout.max_turns",)),
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
    "vllm_importance_sampling_cap": read_with(
        "vllm_importance_sampling_mode", "loss.truncated_importance_sampling_ratio"
    ),
    "vllm_structured_outputs_regex": report("tokens are sampled from the policy's own distribution"),
    **{
        f"vllm_{name}": read_with("vllm_mode", "generation.vllm.server_nodes")
        for name in ("server_base_url", "server_host", "server_port", "server_timeout", "group_port", "model_impl")
    },
    **{
        name: report("set `generation.engine=transformers`", False, here=("generation.engine",))
        for name in ("use_transformers_continuous_batching", "use_transformers_paged")
    },
    "precompute_ref_log_probs": Key(
        ("algorithm.precompute_reference",),
        "of `algorithm=dpo`",
        lambda value, settings: (
            {"algorithm.precompute_reference": value} if settings.get("config") == "DPOConfig" else None
        ),
    ),
    "label_smoothing": report("labels are not smoothed; write your own loss", 0.0),
    "max_length": copy("model.max_sequence_length"),
    "truncation_mode": rename("data.too_long", {"keep_start": "truncate"}, "`truncate` cuts the end of the answer"),
    "packing": if_true({"train.batching": "packed"}),
    "padding_free": if_true({"train.batching": "packed"}),
    "packing_strategy": ignore("sequences are never split"),
    "assistant_only_loss": Key(
        ("data.trained_turns",),
        "the loss is always that of the assistant's turns; `last`: of the last turn only",
        lambda value, settings: (
            None if value else "of records with `messages`, TRL trains on all tokens; here, on the assistant's turns"
        ),
    ),
    "completion_only_loss": report("the loss of prompts with answers is that of the answers", True),
    "dataset_text_field": report("text without prompts is for `algorithm=pretrain`", "text", here=("algorithm",)),
    "center_rewards_coefficient": report("set `mean` and `std` of the reward function `reward_model`"),
    "lr_scheduler_type": rename("optimizer.decay_style", _DECAYS),
    "lr_scheduler_kwargs": report("set `optimizer.min_lr` and `optimizer.decay_steps`", here=("optimizer.min_lr",)),
    "warmup_steps": Key(("optimizer.warmup_steps",), "", _convert_warmup),
    "warmup_ratio": Key(("optimizer.warmup_steps",), "", _convert_warmup),
    "weight_decay": copy("optimizer.weight_decay"),
    "adam_beta1": copy("optimizer.beta1"),
    "adam_beta2": copy("optimizer.beta2"),
    "adam_epsilon": copy("optimizer.epsilon"),
    "max_grad_norm": copy("optimizer.clip_grad"),
    "optim": report("the optimizer is always Adam with decoupled weight decay", "adamw_torch", "adamw_torch_fused"),
    "bf16": if_true({"precision": "bf16"}),
    "fp16": report("there is no fp16; set `precision=bf16`", False, here=("precision",)),
    "tf32": ignore("megatron-core decides it"),
    "gradient_checkpointing": if_true({"model.recompute": "full"}, "on there and off here by default"),
    "gradient_checkpointing_kwargs": ignore("`model.recompute` decides it"),
    "activation_offloading": report("set `model.recompute`", False, here=("model.recompute",)),
    "use_liger_kernel": Key(
        ("train.fused_head",),
        "logits are computed in blocks",
        lambda value, settings: {"train.fused_head": True} if value else None,
    ),
    "router_aux_loss_coef": copy("model.router_aux_loss"),
    "seed": copy("train.seed"),
    "data_seed": ignore("`train.seed` decides it too"),
    "eval_strategy": Key(("train.eval_every",), "in steps", _convert_strategy),
    "eval_steps": only_if(*_STEPS_KEY, _make_steps_key("train.eval_every")),
    "save_steps": Key(
        ("train.save_every",),
        "",
        lambda value, settings: (
            _make_steps_key("train.save_every").translate(value, settings)
            if settings.get("save_strategy", "steps") == "steps"
            else None
        ),
    ),
    "save_strategy": Key(("train.save_every",), "in steps", _convert_strategy),
    "save_total_limit": keep_checkpoints("`null` keeps all"),
    "metric_for_best_model": report("set `train.keep_best` to an eval metric", here=("train.keep_best",)),
    "load_best_model_at_end": report("set `train.keep_best` to an eval metric", False, here=("train.keep_best",)),
    "greater_is_better": ignore("every metric declares its direction"),
    "resume_from_checkpoint": Key(("resume",), "the default", lambda value, settings: None),
    "report_to": Key(
        ("logger.wandb", "logger.mlflow", "logger.swanlab", "logger.trackio"), "several at once", _convert_services
    ),
    "run_name": read_with("report_to", "logger.wandb.name"),
    "logging_steps": ignore("every step is logged"),
    "logging_*": ignore("every step is logged, in `output_dir`"),
    "log_*": ignore("`rollout.save_every` writes completions"),
    "ddp_timeout": compute("train.collective_timeout_minutes", lambda value, settings: value / 60, "seconds there"),
    "push_to_hub": report("`train.export_hf` writes directories for `hf upload`", False, here=("train.export_hf",)),
    "hub_*": read_with("push_to_hub"),
    "deepspeed": report(_SHARDING, here=("optimizer.distributed",)),
    "fsdp": report(_SHARDING, "", [], False, here=("optimizer.distributed",)),
    "fsdp_config": report(_SHARDING, here=("optimizer.distributed",)),
    "model_init_kwargs": ignore("`precision` and `model.backend` decide it"),
    **ignore_each(
        "",
        "trust_remote_code remove_unused_columns disable_dropout cast_lm_head_to_fp32 ds3_gather_for_generation "
        "shuffle_dataset pad_to_multiple_of dataset_num_proc dataloader_num_workers do_train do_eval "
        "ddp_find_unused_parameters torch_empty_cache_steps cache_implementation eos_token pad_token",
    ),
    "LoraConfig.r": copy("peft.r"),
    "LoraConfig.lora_alpha": copy("peft.lora_alpha"),
    "LoraConfig.lora_dropout": copy("peft.lora_dropout"),
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
    "LoraConfig.exclude_modules": copy("peft.exclude_modules"),
    "LoraConfig.modules_to_save": copy("peft.modules_to_save"),
    "LoraConfig.use_rslora": copy("peft.use_rslora"),
    "LoraConfig.use_dora": copy("peft.use_dora"),
    "LoraConfig.init_lora_weights": report("B starts at 0", True),
    "LoraConfig.bias": report("biases are not trained beside an adapter; leave the key out", "none"),
    "LoraConfig.task_type": ignore("the algorithm decides it"),
}

LIBRARY = Library("TRL", KEYS, sections=TRAINERS)

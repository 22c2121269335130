"""The names and the configuration of an adapter in a directory that peft and vLLM load."""

from __future__ import annotations

from collections.abc import Mapping

from rl_megatron.config.peft import LoraConfig
from rl_megatron.model.lora.targets import Part

PEFT_PREFIX = "base_model.model."  # the prefix of tensor names


def build_peft_config(
    config: LoraConfig, linears: Mapping[str, tuple[Part, ...]], base: str | None
) -> dict[str, object]:
    """Return the content of adapter_config.json.

    `linears` are the parts of every linear that has an adapter (`find_adapted_linears`). `base` is the Hugging Face
    directory of the base, or None if it is unknown.
    """
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "use_rslora": config.use_rslora,
        "use_dora": config.use_dora,
        "modules_to_save": None if config.modules_to_save is None else list(config.modules_to_save),
        "target_modules": _list_target_modules(linears),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _list_target_modules(linears: Mapping[str, tuple[Part, ...]]) -> list[str]:
    """Return the name suffixes of the modules with adapters, or whole names if other modules have the same suffixes."""
    parts = [part for linear_parts in linears.values() for part in linear_parts]
    chosen, others = ({p.key for p in parts if p.has_adapter is wanted} for wanted in (True, False))
    if not chosen & others:
        return sorted(chosen)
    return sorted(part.name for part in parts if part.has_adapter)

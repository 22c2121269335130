"""The model families that come from, and go to, Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.schema import ModelConfig
from rl_megatron.model.families.deepseek import DEEPSEEK_V3
from rl_megatron.model.families.family import Family
from rl_megatron.model.families.gemma3 import GEMMA3
from rl_megatron.model.families.llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA, GEMMA3, DEEPSEEK_V3)
# Model keys that change neither what the weights mean nor what comes of them.
NOT_OF_THE_WEIGHTS = frozenset(
    {"recompute", "backend", "init_std", "max_sequence_length", "router_aux_loss", "router_bias_update"}
)


def family_of_config(hf_config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names; `where` it stands is for the message.

    Raises: ConfigError listing the known architectures.
    """
    named = hf_config.get("architectures") or []
    for family in FAMILIES:
        if family.architecture in named:
            return family
    known = ", ".join(family.architecture for family in FAMILIES)
    raise ConfigError(f"{where}: architectures={list(named)} has no family here; known are {known}")


def family_of_model(model: ModelConfig, vocab_size: int) -> Family:
    """The first family whose config.json says all that `model` says, its weights' shapes and its maths.

    Raises: ConfigError where none does.
    """
    wanted = _meaning(model, vocab_size)
    for family in FAMILIES:
        if _meaning(family.read_config(family.write_config(model, vocab_size)), vocab_size) == wanted:
            return family
    raise ConfigError(
        f"model: none of {', '.join(family.architecture for family in FAMILIES)} is a model of these keys, so it "
        "cannot be written for Hugging Face"
    )


def _meaning(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    meaning = {key: value for key, value in asdict(model).items() if key not in NOT_OF_THE_WEIGHTS}
    head_dim = model.head_dim or model.hidden_size // model.num_attention_heads
    return meaning | {"head_dim": head_dim, "vocab_size": model.vocab_size or vocab_size}

"""The model families that come from, and go to, Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model_rules import check_model
from rl_megatron.config.schema import ModelConfig
from rl_megatron.model.families.deepseek import DEEPSEEK_V3
from rl_megatron.model.families.family import FAMILIES, Family, register_family
from rl_megatron.model.families.gemma3 import GEMMA3
from rl_megatron.model.families.hf_config import HFConfig, only
from rl_megatron.model.families.llama import LLAMA
from rl_megatron.model.families.mistral import MISTRAL
from rl_megatron.model.families.mixtral import MIXTRAL
from rl_megatron.model.families.qwen2 import QWEN2
from rl_megatron.model.families.qwen3 import QWEN3
from rl_megatron.model.families.qwen3_moe import QWEN3_MOE

for _family in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3):  # of two that fit, the first
    register_family(_family)

# Model keys that change neither what the weights mean nor what comes of them.
NOT_OF_THE_WEIGHTS = frozenset(
    {"recompute", "backend", "init_std", "max_sequence_length", "router_aux_loss", "router_bias_update"}
)


def read_model(hf_config: Mapping[str, Any], where: str) -> tuple[Family, ModelConfig]:
    """The family and the model section of a config.json.

    Raises: ConfigError naming an unknown architecture, a missing key, or a key and value that there is no maths for.
    """
    family, strict = family_of_config(hf_config, where), HFConfig(hf_config, where)
    only(strict, is_causal=True)  # of encoders made of these decoders: false is not "off"
    try:
        model = family.read_config(strict)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(str(part) for part in wrong["loc"])
        raise ConfigError(f"{where}: {name}={wrong['input']!r}: {wrong['msg']}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: a value is of another type than its key has ({error})") from error
    strict.refuse_unread(family.ignored)
    check_model(model)
    return family, model


def family_of_config(hf_config: Mapping[str, Any], where: str) -> Family:
    """The family that a config.json names; `where` it stands is for the message.

    Raises: ConfigError listing the known architectures.
    """
    named = hf_config.get("architectures") or []
    for family in FAMILIES.values():
        if family.architecture in named:
            return family
    raise ConfigError(f"{where}: architectures={list(named)} has no family here; known are {', '.join(FAMILIES)}")


def family_of_model(model: ModelConfig, vocab_size: int) -> Family:
    """The first family whose config.json says all that `model` says, its weights' shapes and its maths.

    Raises: ConfigError where none does.
    """
    wanted = _meaning(model, vocab_size)
    for family in FAMILIES.values():
        try:
            written = family.read_config(family.write_config(model, vocab_size))
        except (ConfigError, ValidationError):
            continue  # what it needs, such as a number of experts, `model` has not
        if _meaning(written, vocab_size) == wanted:
            return family
    raise ConfigError(
        f"model: none of {', '.join(FAMILIES)} is a model of these keys, so it "
        "cannot be written for Hugging Face"
    )


def same_weights(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether both are the same model: the weights of one are weights of the other, and compute the same."""
    return _meaning(one, 0) == _meaning(other, 0)


def _meaning(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    meaning = {key: value for key, value in asdict(model).items() if key not in NOT_OF_THE_WEIGHTS}
    meaning["head_dim"] = model.head_dim or model.hidden_size // model.num_attention_heads
    meaning["vocab_size"] = model.vocab_size or vocab_size
    if model.num_experts is not None:
        meaning["expert_ffn_hidden_size"] = model.expert_ffn_hidden_size or model.ffn_hidden_size
        if model.first_dense_layers == 0:
            meaning["ffn_hidden_size"] = None  # of dense layers, and there is none
    return meaning

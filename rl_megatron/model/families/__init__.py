"""The model families whose checkpoints can be read from and written to Hugging Face directories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.model_shape import with_derived_sizes
from rl_megatron.config.rules import check_model
from rl_megatron.model.families.deepseek import DEEPSEEK_V3
from rl_megatron.model.families.family import FAMILIES, Family, register_family
from rl_megatron.model.families.gemma3 import GEMMA3
from rl_megatron.model.families.glm4 import GLM4
from rl_megatron.model.families.glm4_moe import GLM4_MOE
from rl_megatron.model.families.gpt_oss import GPT_OSS
from rl_megatron.model.families.hf_config import HFConfig, require_only
from rl_megatron.model.families.llama import LLAMA
from rl_megatron.model.families.mistral import MISTRAL
from rl_megatron.model.families.mixtral import MIXTRAL
from rl_megatron.model.families.qwen2 import QWEN2
from rl_megatron.model.families.qwen3 import QWEN3
from rl_megatron.model.families.qwen3_5 import QWEN3_5
from rl_megatron.model.families.qwen3_5_moe import QWEN3_5_MOE
from rl_megatron.model.families.qwen3_moe import QWEN3_MOE

# If several families can express a model, the first is used.
for _family in (
    LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, MIXTRAL, QWEN3_MOE, GLM4, GLM4_MOE, DEEPSEEK_V3, GPT_OSS, QWEN3_5,
    QWEN3_5_MOE,
):  # fmt: skip
    register_family(_family)

# Model keys that change neither the meaning of the weights nor the model's output.
NOT_OF_THE_WEIGHTS = frozenset(
    {
        "recompute",
        "backend",
        "cudnn_attention",
        "init_std",
        "max_sequence_length",
        "router_aux_loss",
        "router_aux_loss_scope",
        "router_bias_update",
    }
)


def read_model(hf_config: Mapping[str, Any], where: str) -> tuple[Family, ModelConfig]:
    """Return the family and the model section of a config.json. `where` names the file in messages, here and below."""
    family = find_family_of_config(hf_config, where)
    strict = HFConfig(text_config(hf_config, where), where)
    require_only(strict, is_causal=True)  # encoders have false, which `refuse_unread` would accept as "off"
    try:
        model = family.read_config(strict)
    except ValidationError as error:
        wrong = error.errors()[0]
        name = ".".join(str(part) for part in wrong["loc"])
        raise ConfigError(f"{where}: {name}={wrong['input']!r}: {wrong['msg']}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: a value has another type than its key needs ({error})") from error
    strict.refuse_unread(family.ignored)
    check_model(model)
    return family, model


def find_family_of_config(hf_config: Mapping[str, Any], where: str) -> Family:
    """Return the family of the architecture that a config.json names."""
    named = hf_config.get("architectures") or []
    images = {family.with_images.architecture: family for family in FAMILIES.values() if family.with_images}
    for name, family in {**FAMILIES, **images}.items():
        if name in named:
            return family
    raise ConfigError(
        f"{where}: architectures={list(named)} is not supported; supported architectures: {', '.join(FAMILIES)}, and "
        f"the text models of {', '.join(images)}"
    )


def text_config(hf_config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the config.json of the text model alone; it is `hf_config` itself unless the model reads images."""
    family = find_family_of_config(hf_config, where)
    if family.architecture in hf_config["architectures"] or family.with_images is None:
        return hf_config
    return family.with_images.text_config(hf_config, family.architecture, where)


def family_of_model(model: ModelConfig, vocab_size: int) -> Family:
    """Return the first family whose config.json can express the shapes and the computation of `model`.

    `vocab_size` is the number of rows of the embedding if `model.vocab_size` is null.

    Raises:
        ConfigError: No family can express the model.
    """
    wanted = _extract_meaning(model, vocab_size)
    for family in FAMILIES.values():
        try:
            written = family.read_config(family.write_config(model, vocab_size))
        except (ConfigError, ValidationError):
            continue  # the family needs something that the model lacks, such as experts
        if _extract_meaning(written, vocab_size) == wanted:
            return family
    raise ConfigError(
        f"model: none of {', '.join(FAMILIES)} can express these keys, so the model cannot be written for Hugging Face"
    )


def same_weights(one: ModelConfig, other: ModelConfig) -> bool:
    """Return whether both sections describe the same model, so that the same weights give the same output."""
    return _extract_meaning(one, 0) == _extract_meaning(other, 0)


def _extract_meaning(model: ModelConfig, vocab_size: int) -> dict[str, Any]:
    sizes = with_derived_sizes(asdict(model))
    meaning = {key: value for key, value in sizes.items() if key not in NOT_OF_THE_WEIGHTS}
    meaning["vocab_size"] = model.vocab_size or vocab_size
    if model.num_experts is not None and model.first_dense_layers == 0:
        meaning["ffn_hidden_size"] = None  # the key is only about dense layers, and the model has none
    return meaning

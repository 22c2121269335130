"""`Family`: how a model family's Hugging Face config is read and written, and where its weights belong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_megatron.config.model import ModelConfig
from rl_megatron.config.registry import Registry
from rl_megatron.model.families.table import WeightTable


def _none(hf_name: str, model: ModelConfig) -> bool:
    return False


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture.

    Attributes:
        architecture: The architecture's name in `architectures` of a config.json.
        read_config: Returns the model section of a config.json. It raises ConfigError if a key or value is not
            supported, and the message names it.
        write_config: Returns a config.json, given a model section and the number of rows of the embedding. If the
            family can express the model, `read_config` returns the same section for it.
        table: Returns the weight table, given a model section and the number of rows of the embedding.
        is_dropped: Returns whether a tensor of a Hugging Face checkpoint, by its name, is ignored because it is not
            part of the model, neither here nor in transformers.
        ignored: Keys of config.json that change nothing, whatever their value.
        text_name: Returns the name in the table of a checkpoint's tensor, if transformers keeps other names for a text
            model that was loaded from one that reads images.
    """

    architecture: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig, int], dict[str, Any]]
    table: Callable[[ModelConfig, int], WeightTable]
    is_dropped: Callable[[str, ModelConfig], bool] = _none
    ignored: frozenset[str] = frozenset()
    text_name: Callable[[str], str] = str


FAMILIES: Registry[Family] = Registry("model family")  # by architecture


def register_family(family: Family) -> Family:
    """Register a family under its architecture, and return it.

    Raises:
        ValueError: Another family has this architecture already.
    """
    return FAMILIES.register(family.architecture)(family)

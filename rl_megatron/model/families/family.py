"""What a model family is: how its Hugging Face config reads and writes, and its weight table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_megatron.config.registry import Registry
from rl_megatron.config.schema import ModelConfig
from rl_megatron.model.families.table import WeightTable


def _none(hf_name: str, model: ModelConfig) -> bool:
    return False


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture.

    architecture: as `architectures` of a config.json has it.
    read_config: a config.json → our model section.  Raises: ConfigError naming the key that we have no maths for.
    write_config: a model section and the rows of its embedding → a config.json that gives the section back, where the
        family can express it.
    table: a model section and the rows of its embedding → where every weight belongs.
    is_dropped: which tensors a Hugging Face checkpoint may hold beside the table's, by name: no part of the model here,
        nor of transformers', and left behind.
    ignored: keys of its config.json that change nothing, whatever their value.
    """

    architecture: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig, int], dict[str, Any]]
    table: Callable[[ModelConfig, int], WeightTable]
    is_dropped: Callable[[str, ModelConfig], bool] = _none
    ignored: frozenset[str] = frozenset()


FAMILIES: Registry[Family] = Registry("model family")  # by architecture


def register_family(family: Family) -> Family:
    """Register a family under its architecture, and return it.

    Raises:
        ValueError: another family has this architecture already.
    """
    return FAMILIES.register(family.architecture)(family)

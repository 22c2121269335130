"""What a model family is: how its Hugging Face config reads and writes, and its weight table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_megatron.config.schema import ModelConfig
from rl_megatron.model.families.table import WeightTable


@dataclass(frozen=True)
class Family:
    """One Hugging Face architecture.

    architecture: as `architectures` of a config.json has it.
    read_config: a config.json → our model section.  Raises: ConfigError naming the key that we have no maths for.
    write_config: a model section and the rows of its embedding → a config.json that gives the section back, where the
        family can express it.
    table: a model section and the rows of its embedding → where every weight belongs.
    ignored: keys of its config.json that change nothing, whatever their value.
    is_dropped: whether a tensor of its files, by name, belongs to no part of the model; it is left out of an import.
    """

    architecture: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig, int], dict[str, Any]]
    table: Callable[[ModelConfig, int], WeightTable]
    ignored: frozenset[str] = frozenset()
    is_dropped: Callable[[str, ModelConfig], bool] = lambda name, model: False

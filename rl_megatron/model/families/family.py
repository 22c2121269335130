"""`Family`: how a model family's Hugging Face config is read and written, and where its weights belong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl_megatron.config.loading.registry import Registry
from rl_megatron.config.model import ModelConfig
from rl_megatron.model.families.table import WeightTable
from rl_megatron.model.families.with_images import WithImages, is_of_images


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
            family can express the model, `read_config` converts the result back to the same section.
        table: Returns the weight table, given a model section and the number of rows of the embedding.
        is_dropped: Returns whether the tensor of this name in a Hugging Face checkpoint is ignored, because it is part
            of the model neither here nor in transformers.
        ignored: Keys of config.json that change nothing, whatever their value.
        with_images: The supported models that read images and have a text model of this family, or None if there are
            none.
        stacked_experts: Suffix of the name of a tensor that may stack all experts of a layer, [E, rows, columns] → the
            linears in its rows, from top to bottom. The table has each expert's linear as a separate tensor.
    """

    architecture: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    write_config: Callable[[ModelConfig, int], dict[str, Any]]
    table: Callable[[ModelConfig, int], WeightTable]
    is_dropped: Callable[[str, ModelConfig], bool] = _none
    ignored: frozenset[str] = frozenset()
    with_images: WithImages | None = None
    stacked_experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def leaves_out(self, hf_name: str, model: ModelConfig) -> bool:
        """Return whether a tensor is not part of the text model: it is dropped, or belongs to the image part."""
        return self.is_dropped(hf_name, model) or (self.with_images is not None and is_of_images(hf_name))


FAMILIES: Registry[Family] = Registry("model family")  # by architecture


def register_family(family: Family) -> Family:
    """Register a family under its architecture, and return it.

    Raises:
        ValueError: Another family has this architecture already.
    """
    return FAMILIES.register(family.architecture)(family)

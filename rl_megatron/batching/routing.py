"""The recorded experts of a batch: which experts each token was routed to when the batch was generated."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rl_megatron.config.errors import ConfigError
from rl_megatron.config.model import ModelConfig

ROUTED_EXPERTS = "routed_experts"
"""The key [B, S, L, k] int16 of a batch: the experts of each token in each of the model's L layers."""

UNKNOWN_EXPERT = -1
"""The expert index of tokens whose experts were not recorded, such as a sequence's last token."""


def check_routed_experts(batch: Mapping[str, Tensor], model: ModelConfig) -> None:
    """Raise ConfigError if a batch's recorded experts do not fit its tokens or the mixture-of-experts `model`."""
    experts = batch[ROUTED_EXPERTS]
    wanted = (*batch["input_ids"].shape, model.num_layers, model.experts_per_token)
    if tuple(experts.shape) != wanted:
        raise ConfigError(
            f"routed_experts has shape {tuple(experts.shape)}, but the batch's tokens, model.num_layers and "
            f"model.experts_per_token require {wanted}; replay only what an engine recorded with this model"
        )
    lowest, highest = (int(value) for value in experts.aminmax())
    if lowest < UNKNOWN_EXPERT or highest >= (model.num_experts or 0):
        raise ConfigError(
            f"routed_experts has expert {lowest if lowest < UNKNOWN_EXPERT else highest}, but model.num_experts="
            f"{model.num_experts}; replay only what an engine recorded with this model"
        )

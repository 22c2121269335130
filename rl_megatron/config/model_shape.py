"""Sizes of a model's parts that follow from several keys of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_megatron.config.model import ModelConfig


@dataclass(frozen=True)
class LatentShape:
    """The dimensions of multi-head latent attention, for a model with `kv_lora_rank`.

    Attributes:
        latent: Dimensions of the latent that the keys and values of all heads are computed from.
        nope: Dimensions of a head's queries and keys without RoPE.
        rope: Dimensions of a head's queries and keys with RoPE.
        value: Dimensions of a head's values.
    """

    latent: int
    nope: int
    rope: int
    value: int

    @classmethod
    def of(cls, model: ModelConfig) -> LatentShape:
        """Return the dimensions of `model`.

        Raises:
            ValueError: One of them is null.
        """
        latent, value = model.kv_lora_rank, model.v_head_dim
        nope, rope = model.qk_nope_head_dim, model.qk_rope_head_dim
        if latent is None or nope is None or rope is None or value is None:
            raise ValueError(
                f"latent attention needs all of model.kv_lora_rank={latent}, model.qk_nope_head_dim={nope}, "
                f"model.qk_rope_head_dim={rope} and model.v_head_dim={value}"
            )
        return cls(latent, nope, rope, value)

    @property
    def query(self) -> int:
        """Return the dimensions of a head's queries, which are those of its keys."""
        return self.nope + self.rope

    @property
    def key_and_value(self) -> int:
        """Return the dimensions of a head's keys and values that are computed from the latent."""
        return self.nope + self.value


def head_size(model: ModelConfig) -> int:
    """Return the dimensions of a head's queries, keys and values in a model without latents."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def with_derived_sizes(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model section in which sizes that are null have the value that they stand for, to compare models.

    They are `head_dim`, without latents, and `expert_ffn_hidden_size` of a mixture of experts.
    """
    sizes = dict(model)
    if sizes.get("head_dim") is None and sizes.get("kv_lora_rank") is None:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if sizes.get("expert_ffn_hidden_size") is None and sizes.get("num_experts") is not None:
        sizes["expert_ffn_hidden_size"] = sizes["ffn_hidden_size"]
    return sizes


def query_size(model: ModelConfig) -> int:
    """Return the dimensions of a head's queries."""
    return head_size(model) if model.kv_lora_rank is None else LatentShape.of(model).query


def rotary_size(model: ModelConfig) -> int:
    """Return how many dimensions of a head's queries RoPE rotates."""
    return model.qk_rope_head_dim or int(head_size(model) * model.partial_rotary_factor)


def num_experts(model: ModelConfig) -> int:
    """Return the number of experts of a mixture of experts.

    Raises:
        ValueError: The model is dense.
    """
    if model.num_experts is None:
        raise ValueError("model.num_experts=null: a dense model has no experts")
    return model.num_experts

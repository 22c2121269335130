"""Sizes of a model's parts that follow from several keys of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    def from_model(cls, model: ModelConfig) -> LatentShape:
        """Return the dimensions of `model`; raise ValueError if one of them is null."""
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
        """Return the dimensions of a head's queries; its keys have as many."""
        return self.nope + self.rope

    @property
    def key_and_value(self) -> int:
        """Return the dimensions of a head's keys and values that are computed from the latent."""
        return self.nope + self.value


@dataclass(frozen=True)
class DeltaShape:
    """The dimensions of the gated delta rule, for a model with `full_attention_every`.

    A group is a head of queries and keys with its value heads.

    Attributes:
        groups: The number of groups.
        values: The number of value heads in a group.
        key: Dimensions of a group's queries and keys.
        value: Dimensions of a value head.
        kernel: The width of the convolution, in tokens.
    """

    groups: int
    values: int
    key: int
    value: int
    kernel: int

    @classmethod
    def from_model(cls, model: ModelConfig) -> DeltaShape:
        """Return the dimensions of `model`; raise ValueError if one of them is null."""
        groups, heads = model.linear_num_key_heads, model.linear_num_value_heads
        key, value, kernel = model.linear_key_head_dim, model.linear_value_head_dim, model.linear_conv_kernel_dim
        if groups is None or heads is None or key is None or value is None or kernel is None:
            raise ValueError(
                f"the gated delta rule needs all of model.linear_num_key_heads={groups}, "
                f"model.linear_num_value_heads={heads}, model.linear_key_head_dim={key}, "
                f"model.linear_value_head_dim={value} and model.linear_conv_kernel_dim={kernel}"
            )
        return cls(groups, heads // groups, key, value, kernel)

    @property
    def convolved(self) -> int:
        """Return the number of channels per group that are convolved: query, key and values."""
        return 2 * self.key + self.values * self.value

    @property
    def recurrent(self) -> int:
        """Return the number of the rule's inputs per group: the channels, and a strength and a decay per value head."""
        return self.convolved + 2 * self.values

    @property
    def projected(self) -> int:
        """Return the number of projected channels per group: `recurrent`, and a gate per value dimension."""
        return self.recurrent + self.values * self.value


class LayerKind(NamedTuple):
    """The kind of a layer: that of its MLP, and that of its attention.

    Attributes:
        has_experts: Whether it has experts instead of a dense MLP.
        has_delta_rule: Whether it has the gated delta rule instead of attention.
    """

    has_experts: bool = False
    has_delta_rule: bool = False

    @classmethod
    def from_model(cls, model: ModelConfig, layer: int) -> LayerKind:
        """Return the kind of a layer; `layer` counts from 0."""
        every = model.full_attention_every
        return cls(
            has_experts=model.num_experts is not None and layer >= model.first_dense_layers,
            has_delta_rule=every is not None and (layer + 1) % every != 0,
        )


def head_size(model: ModelConfig) -> int:
    """Return the dimensions of a head's queries, keys and values in a model without latents."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def with_derived_sizes(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model section in which derived values replace null sizes, so that models can be compared.

    The sizes are `head_dim` (without latent attention) and `expert_ffn_hidden_size` (with experts).
    """
    sizes = dict(model)
    if sizes.get("head_dim") is None and sizes.get("kv_lora_rank") is None:
        sizes["head_dim"] = sizes["hidden_size"] // sizes["num_attention_heads"]
    if sizes.get("expert_ffn_hidden_size") is None and sizes.get("num_experts") is not None:
        sizes["expert_ffn_hidden_size"] = sizes["ffn_hidden_size"]
    return sizes


def query_size(model: ModelConfig) -> int:
    """Return the dimensions of a head's queries."""
    return head_size(model) if model.kv_lora_rank is None else LatentShape.from_model(model).query


def rotary_size(model: ModelConfig) -> int:
    """Return how many dimensions of a head's queries RoPE rotates."""
    return model.qk_rope_head_dim or int(head_size(model) * model.partial_rotary_factor)


def num_experts(model: ModelConfig) -> int:
    """Return the number of experts of a mixture of experts; raise ValueError if the model is dense."""
    if model.num_experts is None:
        raise ValueError("model.num_experts=null: a dense model has no experts")
    return model.num_experts

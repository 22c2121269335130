"""Cache keys and values of running sequences in an attention function that Hugging Face models call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import AttentionInterface, PreTrainedModel

from rl_megatron.generation.slot_cache import SlotCache
from rl_megatron.model.layers.delta_rule import DeltaStates, apply_delta_rule, compute_log_decays, convolve
from rl_megatron.model.layers.sinks import attend_with_sinks

ATTENTION = "rl_megatron"  # the attention's name in transformers, which makes no masks for names that it does not know


class CachedAttention(SlotCache):
    """A `SlotCache` of a Hugging Face model, and its attention."""

    def __init__(self, model: PreTrainedModel, num_slots: int, capacity: int, routing: tuple[int, int] | None = None):
        """Make an empty cache, and let the model use it; see `SlotCache`."""
        super().__init__(num_slots, capacity, model.device, routing)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.__dict__["slot_cache"] = self  # where `_attend` finds it

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention's output [B, S, N, D], and cache the new keys and values.

        Args:
            layer: The layer's number.
            query: [B, N, S, D].
            key: [B, G, S, D].
            value: [B, G, S, D].
            scale: The factor of the scores; None for 1/√D.
            window: The number of tokens that a token attends to, itself included; None for no limit.
            sinks: [N], the score of each head's sink; None if heads have no sinks.
        """
        self.keep(layer, key, value)
        if self.positions is not None:
            return self.attend_to_cached(layer, query[:, :, 0], scale, window, sinks)[:, None]
        mask, grouped = self.get_mask(key.size(2), window, query), query.size(1) != key.size(1)
        if sinks is not None:
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), dim=1) for x in (key, value))
            return attend_with_sinks(query, key, value, sinks, mask, scale).transpose(1, 2)
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        return output.transpose(1, 2)

    def keep_experts(self, experts: Tensor) -> None:
        """Keep the experts of the last pass, [sequences, tokens, layers, k]."""
        if self.experts is None:
            raise RuntimeError("the cache was made without `routing`, so it keeps no experts")
        if self.positions is None:
            self.experts[self.slots, :, : experts.size(1)] = experts.transpose(1, 2)[self.sources]
        else:
            self.experts[self.slots, :, self.positions] = experts[:, 0]


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Return a layer's attention output [B, S, N, D]. The signature is that of transformers' attention functions."""
    cache: CachedAttention = module.__dict__["slot_cache"]
    layer = module.__dict__["layer_idx"]
    return cache.attend(layer, query, key, value, scaling, sliding_window, s_aux), None


def compute_gated_delta(module: torch.nn.Module, hidden_states: Tensor, **_: object) -> Tensor:
    """Return the output [B, S, H] of a gated delta net of Qwen3.5 in transformers, and cache its states.

    It replaces the module's `forward`, which would keep the states in a cache of transformers.
    """
    net: Any = module
    cache, layer = module.__dict__["slot_cache"], module.__dict__["layer_idx"]
    initial, lengths = cache.get_states(layer, len(hidden_states)), cache.lengths if cache.positions is None else None
    groups, values = net.num_k_heads, net.num_v_heads // net.num_k_heads
    channels, last = convolve(
        net.in_proj_qkv(hidden_states), net.conv1d.weight.squeeze(1), None if initial is None else initial.last, lengths
    )
    query, key, value = silu(channels).split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    steps, strength = (
        project(hidden_states).unflatten(-1, (groups, values)) for project in (net.in_proj_a, net.in_proj_b)
    )
    log_rate, bias = (x.unflatten(0, (groups, values)) for x in (net.A_log, net.dt_bias))
    output, memory = apply_delta_rule(
        query.unflatten(-1, (groups, -1)), key.unflatten(-1, (groups, -1)), value.unflatten(-1, (groups, values, -1)),
        compute_log_decays(steps, log_rate, bias), strength.sigmoid(), None if initial is None else initial.memory,
        lengths,
    )  # fmt: skip
    cache.keep_states(layer, DeltaStates(last, memory))
    gate = net.in_proj_z(hidden_states).unflatten(-1, (groups, values, -1))
    return net.out_proj(net.norm(output.to(hidden_states.dtype), gate).flatten(2))


AttentionInterface.register(ATTENTION, _attend)

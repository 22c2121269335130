"""Cache keys and values of running sequences: during generation, a caching core attention replaces the model's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_megatron.generation.slot_cache import SlotCache
from rl_megatron.model.layers.attention import attend, get_sliding_window
from rl_megatron.model.layers.gated_delta import DeltaCore

# Sequence parallelism cannot split a single token. Transformer Engine's fused RoPE uses the same positions for all
# sequences of a batch, but positions differ in a decoding step.
_SWITCHED_OFF = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings", "apply_rope_fusion")


class KVCache(SlotCache):
    """A `SlotCache` of megatron-core's layers."""

    def __init__(
        self, models: Sequence[GPTModel], num_slots: int, capacity: int, routing: tuple[int, int] | None = None
    ):
        """Make an empty cache for the model chunks of this rank; see `SlotCache`."""
        super().__init__(num_slots, capacity, next(models[0].parameters()).device, routing)
        attentions = [cast(Attention, layer.self_attention) for model in models for layer in model.decoder.layers]
        # `Any`, because the delta rule takes other arguments than a core attention of megatron-core.
        self.replaced: dict[Attention, Any] = {
            attention: CachedDelta(self, attention.core_attention, attention.layer_number)
            if isinstance(attention.core_attention, DeltaCore)
            else CachedAttention(
                self,
                attention.config,
                attention.layer_number,
                getattr(attention.core_attention, "softmax_offset", None),
            )
            for attention in attentions
        }

    def keep_experts(self, layer: int, experts: Tensor) -> None:
        """Keep the experts [tokens, k] that a layer of the current forward pass chose.

        `layer` is the index in the whole model. `experts` is ordered by position: the first token of
        every sequence, then the second, and so on.
        """
        if self.experts is None:
            raise RuntimeError("the cache was made without `routing`, so it keeps no experts")
        cached = self.experts[:, layer]
        if self.positions is None:
            by_sequence = experts.short().view(-1, len(self.lengths), cached.size(-1)).transpose(0, 1)
            cached[self.slots, : by_sequence.size(1)] = by_sequence[self.sources]
        else:
            cached[self.slots, self.positions] = experts.short()


class CachedAttention(torch.nn.Module):
    """The attention of new tokens to their own sequences, whose keys and values are cached.

    Shapes: query is [S, B, N, D], key and value are [S, B, G, D], as in `PortableAttention`.
    """

    def __init__(self, cache: KVCache, config: TransformerConfig, layer_number: int, sinks: Tensor | None):
        super().__init__()
        self.sinks = None if sinks is None else sinks.detach()  # it shares the memory of the model's parameter
        # The cache owns this module. A strong reference back would keep the cache's memory until a garbage collection.
        self.cache, self.softmax_scale = weakref.proxy(cache), config.softmax_scale
        self.layer_number, self.window = layer_number, get_sliding_window(config, layer_number)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """Return the attention's output [S, B, N·D], and cache the new keys and values."""
        cache = self.cache
        cache.keep(self.layer_number, key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3))
        if cache.positions is None:
            mask = cache.get_mask(key.size(0), self.window, query)
            return attend(query, key, value, mask, self.softmax_scale, self.sinks)
        layer, scale = self.layer_number, self.softmax_scale
        return cache.attend_to_cached(layer, query[0], scale, self.window, self.sinks).flatten(1)[None]


class CachedDelta(torch.nn.Module):
    """The gated delta rule for new tokens, starting from the cached states of their sequences."""

    def __init__(self, cache: KVCache, core: DeltaCore, layer_number: int):
        super().__init__()
        self.__dict__["core"] = core  # not a submodule: its parameters would get a second name
        self.cache, self.layer_number = weakref.proxy(cache), layer_number

    def forward(self, mixed: Tensor, **_: object) -> Tensor:
        """Return the output [S, B, G, R, Dv] of new tokens [S, B, G, C], and keep their states."""
        cache, core = self.cache, self.__dict__["core"]
        initial = cache.get_states(self.layer_number, mixed.size(1))
        lengths = cache.lengths if cache.positions is None else None
        output, states = core.compute(mixed.transpose(0, 1), initial, lengths)
        cache.keep_states(self.layer_number, states)
        return output.transpose(0, 1)


@contextmanager
def caching(models: Sequence[GPTModel], cache: KVCache) -> Iterator[None]:
    """Replace each layer's core attention, of any backend, by a caching one within the context.

    Sequence parallelism and fused RoPE, which do not support single tokens, are switched off. Nothing else changes.
    """
    originals = [(attention, attention.core_attention) for attention in cache.replaced]
    # megatron-core has a function that switches sequence parallelism off, but it caches modules by `id(model)`, and a
    # new model can have the id of a deleted one.
    switched = [
        (holder, flag)
        for model in models
        for holder in (model.config, *model.modules())
        for flag in _SWITCHED_OFF
        if getattr(holder, flag, False) is True
    ]
    try:
        for attention, cached in cache.replaced.items():
            attention.core_attention = cached
        for holder, flag in switched:
            setattr(holder, flag, False)
        yield
    finally:
        for attention, original in originals:
            attention.core_attention = original
        for holder, flag in switched:
            setattr(holder, flag, True)

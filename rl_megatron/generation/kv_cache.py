"""Cache the keys and values of decoded tokens, in a core attention that replaces the model's during generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rl_megatron.model.layers.attention import attend, sliding_window
from rl_megatron.model.layers.packed import causal_mask

_SEQUENCE_PARALLEL_FLAGS = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


@dataclass
class Columns:
    """The columns of a left-padded batch, in which all prompts end in the same column.

    RoPE takes columns as positions. It is relative, so a sequence's left padding changes nothing.

    Attributes:
        first: The first column of each sequence that is not padding, [B].
        capacity: The number of columns that the cache can hold.
        filled: The number of columns that are cached already.
    """

    first: Tensor
    capacity: int
    filled: int = 0

    def mask(self, num_new: int, window: int | None) -> Tensor:
        """Return which columns each new column attends to, [B, 1, num_new, filled + num_new]."""
        device = self.first.device
        seen = torch.arange(self.filled + num_new, device=device)
        new = torch.arange(self.filled, self.filled + num_new, device=device)
        causal = causal_mask(new, len(seen), window)
        real = seen[None, None, :] >= self.first[:, None, None]
        itself = seen[None, :] == new[:, None]  # padding attends to itself, because an empty softmax would be NaN
        return ((causal & real) | itself)[:, None]


class CachedAttention(torch.nn.Module):
    """Attention of the new columns over all columns so far.

    It appends the new keys, to which RoPE has been applied, and the new values to its cache.
    """

    def __init__(self, columns: Columns, config: TransformerConfig, layer_number: int):
        super().__init__()
        self.columns, self.softmax_scale = columns, config.softmax_scale
        self.window = sliding_window(config, layer_number)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """Attend from the new columns, and cache their keys and values."""
        start, stop = self.columns.filled, self.columns.filled + key.size(0)
        if self.keys is None or self.values is None:
            self.keys, self.values = (x.new_zeros(self.columns.capacity, *x.shape[1:]) for x in (key, value))
        self.keys[start:stop], self.values[start:stop] = key, value
        mask = self.columns.mask(key.size(0), self.window)
        return attend(query, self.keys[:stop], self.values[:stop], mask, self.softmax_scale)


@contextmanager
def caching(models: list[GPTModel], columns: Columns) -> Iterator[None]:
    """Replace each layer's core attention by a caching one, and switch sequence parallelism off, within the context.

    Core attention has no parameters, so nothing else changes, whatever the backend. Sequence parallelism cannot split a
    single column.
    """
    attentions = [cast(Attention, layer.self_attention) for model in models for layer in model.decoder.layers]
    originals = [attention.core_attention for attention in attentions]
    # megatron-core can switch sequence parallelism off too, but it finds modules by the `id` of their model, which a
    # later model may share with a deleted one.
    switched = [
        (holder, flag)
        for model in models
        for holder in (model.config, *model.modules())
        for flag in _SEQUENCE_PARALLEL_FLAGS
        if getattr(holder, flag, False) is True
    ]
    try:
        for attention in attentions:
            attention.core_attention = CachedAttention(columns, attention.config, attention.layer_number)
        for holder, flag in switched:
            setattr(holder, flag, False)
        yield
    finally:
        for attention, original in zip(attentions, originals, strict=True):
            attention.core_attention = original
        for holder, flag in switched:
            setattr(holder, flag, True)

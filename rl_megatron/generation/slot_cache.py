"""The keys, values and states of running sequences, and the attention of new tokens to them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rl_megatron.model.layers.delta_rule import DeltaStates
from rl_megatron.model.layers.packed import build_causal_bias
from rl_megatron.model.layers.sinks import attend_once_with_sinks


class SlotCache:
    """The keys and values of every layer, for a number of slots of equal capacity. A slot holds one sequence.

    Layers with the gated delta rule have states of fixed size instead (`DeltaStates`). The cache can also hold the
    experts to which the routers of this rank's layers sent the tokens.

    The token at position p of a slot's sequence is in column p. `write_prompts` or `write_tokens` must be called before
    each forward pass to set where the pass writes. Subclasses connect a model's layers with the cache.
    """

    def __init__(self, num_slots: int, capacity: int, device: torch.device, routing: tuple[int, int] | None = None):
        """Make an empty cache.

        Args:
            num_slots: The number of slots.
            capacity: The number of tokens in a slot.
            device: The device of the routed experts; keys and values are where the model computes them.
            routing: The numbers of the whole model's layers and of experts per token; None keeps no routed experts.
        """
        self.num_slots, self.capacity = num_slots, capacity
        self.experts: Tensor | None = None  # [slots, layers, capacity, k], 0 in layers of other pipeline stages
        if routing is not None:
            layers, experts_per_token = routing
            shape = (num_slots, layers, capacity, experts_per_token)
            self.experts = torch.zeros(shape, dtype=torch.int16, device=device)
        # [slots, G, capacity, D] of each layer, so that the columns that a head reads are contiguous.
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._delta_states: dict[int, DeltaStates] = {}
        self._masks: dict[int | None, Tensor | None] = {}

    def write_prompts(self, slots: Tensor, sources: Tensor, lengths: Tensor) -> None:
        """Make the next forward pass write slots from their first column on, without attention to cached columns.

        Args:
            slots: The slots, [b].
            sources: For each slot, the index of its sequence in the pass, [b].
            lengths: The number of tokens of each sequence in the pass, without padding.
        """
        self.slots, self.sources, self.positions, self.width = slots, sources, None, 0
        self.lengths = lengths
        self._masks.clear()

    def write_tokens(self, slots: Tensor, positions: Tensor, width: int) -> None:
        """Make the next forward pass write one token into each of the first n slots.

        Args:
            slots: 0 … n − 1, on the device.
            positions: The column of each token, [n].
            width: The number of columns that are read. All positions are below it.
        """
        self.slots, self.positions, self.width = slots, positions, width
        self._masks.clear()

    def keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Keep the keys and values [b, G, s, D] of a layer's new tokens; s = 1 in a decoding step."""
        if layer not in self._layers:
            self._layers[layer] = self._empty_like(key), self._empty_like(value)
        for cached, new in zip(self._layers[layer], (key, value), strict=True):
            if self.positions is None:
                cached[self.slots, :, : new.size(2)] = new[self.sources]
            else:
                cached[self.slots, :, self.positions] = new[:, :, 0]

    def attend_to_cached(
        self, layer: int, query: Tensor, scale: float | None, window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Return the attention's output [n, N, D] for one new token in each of the first n slots.

        Args:
            layer: The layer's number.
            query: [n, N, D].
            scale: The factor of the scores; None for 1/√D.
            window: The number of tokens that a token attends to, itself included; None for no limit.
            sinks: [N], the score of each head's sink; None if heads have no sinks.
        """
        keys, values = (cached[: len(query), :, : self.width] for cached in self._layers[layer])
        # Heads that share a key are passed as several queries of one head, so that keys need not be repeated.
        queries, mask = query.unflatten(1, (keys.size(1), -1)), self.get_mask(1, window, query)
        if sinks is None:
            output = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
        else:
            output = attend_once_with_sinks(queries, keys, values, sinks, mask, scale)
        return output.flatten(1, 2)

    def get_states(self, layer: int, num_sequences: int) -> DeltaStates | None:
        """Return a layer's states before the pass, of the first `num_sequences` slots, or None if all are 0."""
        if self.positions is None or layer not in self._delta_states:
            return None
        return DeltaStates(*(state[:num_sequences] for state in self._delta_states[layer]))

    def keep_states(self, layer: int, states: DeltaStates) -> None:
        if layer not in self._delta_states:
            self._delta_states[layer] = DeltaStates(*(x.new_zeros(self.num_slots, *x.shape[1:]) for x in states))
        for cached, new in zip(self._delta_states[layer], states, strict=True):
            if self.positions is None:
                cached[self.slots] = new[self.sources]
            else:
                cached[: len(new)] = new

    def get_mask(self, num_new: int, window: int | None, like: Tensor) -> Tensor | None:
        """Return the mask of a layer with this window. It is made once per forward pass.

        Returns:
            The bias that is added to the scores, with the dtype of `like`: for prompts, [num_new, num_new], or None for
            plain causal attention; for tokens, [n, 1, 1, width].
        """
        if window not in self._masks:
            self._masks[window] = self._make_mask(num_new, window, like)
        return self._masks[window]

    def _make_mask(self, num_new: int, window: int | None, like: Tensor) -> Tensor | None:
        if self.positions is not None:
            return build_causal_bias(self.positions, self.width, window, like.dtype)[:, None, None]
        if window is None or window >= num_new:
            return None
        return build_causal_bias(torch.arange(num_new, device=like.device), num_new, window, like.dtype)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy slots to other slots."""
        for tensor in self.tensors():
            tensor[targets] = tensor[sources]

    def clear(self, slots: Tensor) -> None:
        """Set slots to 0. A NaN in a masked column would otherwise reach the slot's next sequence."""
        for tensor in self.tensors():
            tensor[slots] = 0

    def resize(self, num_slots: int, capacity: int) -> None:
        """Make more slots or more columns, and keep all that is cached."""
        self.num_slots, self.capacity = num_slots, capacity
        if self.experts is not None:
            self.experts = self._enlarge(self.experts)
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = self._enlarge(keys), self._enlarge(values)
        for layer, states in self._delta_states.items():
            self._delta_states[layer] = DeltaStates(
                *(torch.cat([state, state.new_zeros(num_slots - len(state), *state.shape[1:])]) for state in states)
            )

    def tensors(self) -> list[Tensor]:
        """Return all tensors of the cache."""
        layers = (*self._layers.values(), *self._delta_states.values())
        tensors = [tensor for layer in layers for tensor in layer]
        return tensors if self.experts is None else [*tensors, self.experts]

    def _empty_like(self, new: Tensor) -> Tensor:
        return new.new_zeros(self.num_slots, new.size(1), self.capacity, new.size(3))

    def _enlarge(self, old: Tensor) -> Tensor:
        new = self._empty_like(old)
        new[: old.size(0), :, : old.size(2)] = old
        return new
